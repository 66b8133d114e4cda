"""What devices send, of modules whose collectives are known."""

import numpy as np
import pytest

from jaxllm.aot import collectives, hlo
from jaxllm.aot.collectives import Sent

HOSTS = (0, 0, 0, 0, 1, 1, 1, 1)
ALL, PAIRS, APART = "replica_groups={}", "replica_groups=[4,2]<=[8]", "replica_groups=[4,2]<=[2,4]T(1,0)"


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("channel_id=1", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (f"{ALL}, to_apply=%add", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups={{0,2},{1,3},{4,6},{5,7}}, x={}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (f"{PAIRS}, x", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (f"{APART}, x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['axis_0'=8] {'axis_0'}, x", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}, x", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'data'}, x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh[data=2,tensor=4] {data,tensor}, x", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=mesh['t'=8] {'t':(2)2}, x", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['t'=8] {'t':(1)2,'t':(4)2}, x", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([8]<=[4,2]T(1,0)) {'b'}, x", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'b'}, x", [[7, 6, 5, 4], [3, 2, 1, 0]]),
    ],
)
def test_who_takes_part(text, groups):
    assert collectives.parse_groups(text, 8).tolist() == groups


def test_a_form_that_is_not_known_is_no_guess():
    with pytest.raises(ValueError, match="unknown form of the devices of a collective: 'new'"):
        collectives.parse_groups("replica_groups=new", 8)


def one(kind: str, groups: str, *, network: bool, result: str = "f32[100]") -> tuple[bool, Sent]:
    """Of 400 bytes on each of eight devices."""
    text = f"""HloModule m

ENTRY %main (x: f32[100]) -> {result} {{
  %x = f32[100]{{0:T(128)S(1)}} parameter(0)
  ROOT %y = {result}{{0}} {kind}(%x), channel_id=1, {groups}, use_global_device_ids=true
}}
"""
    (((found, crosses), sent),) = collectives.count(hlo.parse(text), HOSTS, has_network=network).items()
    assert found == kind and (sent.count, sent.operand_bytes) == (1, 400)
    return crosses, sent


@pytest.mark.parametrize(
    ("kind", "link", "link_of_two", "network"),
    [
        ("all-reduce", 700, 600, 100),  # 2 * 7/8; 2 * 3/4, and a quarter of it between two hosts
        ("all-gather", 2800, 2400, 400),  # what each of three others lacks, of two hosts
        ("reduce-scatter", 350, 300, 50),
        ("all-to-all", 350, 150, 200),
    ],
)
def test_bytes_sent(kind, link, link_of_two, network):
    crosses, sent = one(kind, ALL, network=False)  # a TPU's links go to other hosts too
    assert crosses and (sent.link_bytes, sent.network_bytes) == (link, 0)
    crosses, sent = one(kind, ALL, network=True)
    assert crosses and (sent.link_bytes, sent.network_bytes) == (link_of_two, network)


def test_a_sum_that_is_rounded_counts_as_its_result():
    text = """HloModule m

ENTRY %main (x: f32[100]) -> bf16[100] {
  %x = f32[100]{0} parameter(0)
  ROOT %y = bf16[100]{0:T(256)(128)(2,1)S(1)} all-reduce(%x), channel_id=1, replica_groups={}
}
"""
    assert collectives.count(hlo.parse(text), HOSTS, has_network=False) == {("all-reduce", True): Sent(1, 200, 350, 0)}


def test_groups_within_hosts_and_across():
    crosses, sent = one("all-reduce", PAIRS, network=True)
    assert not crosses and (sent.link_bytes, sent.network_bytes) == (400, 0)
    crosses, sent = one("all-reduce", APART, network=True)
    assert crosses and (sent.link_bytes, sent.network_bytes) == (0, 400)
    crosses, sent = one("collective-permute", "source_target_pairs={{0,1},{1,2}}", network=True)
    assert not crosses and (sent.link_bytes, sent.network_bytes) == (400, 0)
    crosses, sent = one("collective-permute", "source_target_pairs={{3,4}}", network=True)
    assert crosses and (sent.link_bytes, sent.network_bytes) == (0, 400)


def test_what_devices_send_adds_up_to_what_must_cross():
    """All-reduce between hosts: every byte leaves each host once for the sum and is spread once, by any scheme."""
    _, sent = one("all-reduce", ALL, network=True)
    assert 4 * sent.network_bytes == 2 * (2 - 1) / 2 * 400


LOOP = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%wrapped (w: f32[100]) -> f32[100] {
  %w = f32[100]{0} parameter(0)
  ROOT %g = f32[100]{0} all-reduce(%w), replica_groups=[2,4]<=[8], to_apply=%add
}

%body (p: (s32[], f32[100])) -> (s32[], f32[100]) {
  %p = (s32[], f32[100]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[100]{0} get-tuple-element(%p), index=1
  %s = ((f32[100]{0}), f32[100]{0}, u32[]) async-start(%x), calls=%wrapped
  %d = f32[100]{0} async-done(%s), calls=%wrapped
  ROOT %t = (s32[], f32[100]{0}) tuple(%i, %d)
}

%cond (q: (s32[], f32[100])) -> pred[] {
  %q = (s32[], f32[100]{0}) parameter(0)
  ROOT %done = pred[] custom-call(%q), custom_call_target="unknowable"
}

ENTRY %main (n: s32[], x: f32[100]) -> f32[100] {
  %n = s32[] parameter(0)
  %x.1 = f32[100]{0} parameter(1)
  %go = ((f32[100]{0}), f32[100]{0}) all-reduce-start(%x.1), replica_groups=[2,4]<=[8], to_apply=%add
  %y = f32[100]{0} all-reduce-done(%go)
  %start = (s32[], f32[100]{0}) tuple(%n, %y)
  %loop = (s32[], f32[100]{0}) while(%start), condition=%cond, body=%bodyTRIPS
  ROOT %out = f32[100]{0} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(
    ("trips", "open_trips", "runs"), [("", 0, 1), ("", 5, 6), (', backend_config={"known_trip_count":{"n":"3"}}', 5, 4)]
)
def test_what_starts_counts_once_and_loops_as_often_as_they_run(trips, open_trips, runs):
    module = hlo.parse(LOOP.replace("TRIPS", trips))
    found = collectives.count(module, HOSTS, has_network=True, open_trips=open_trips)
    assert found == {("all-reduce", False): Sent(runs, 400 * runs, 600 * runs, 0)}


def test_every_group_covers_each_device_once():
    for text in (ALL, PAIRS, APART):
        assert sorted(np.ravel(collectives.parse_groups(text, 8))) == list(range(8))
