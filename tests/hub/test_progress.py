import io

import pytest

from jaxllm.hub.progress import DownloadProgress, DownloadStopped, size


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_line_every_ten_seconds_where_there_is_no_terminal():
    now, out = [0.0], io.StringIO()
    with DownloadProgress("org/name", 10**9, out, clock=lambda: now[0]) as progress:
        bar = progress.bar_class()(desc="a file", total=10**9, unit="B")
        for seconds in range(1, 22):
            now[0] = float(seconds)
            bar.update(10_000_000)
    assert out.getvalue().splitlines() == [
        "org/name: 100 MB of 1 GB (10%), 10 MB/s",
        "org/name: 200 MB of 1 GB (20%), 10 MB/s",
    ]


def test_one_bar_for_all_files_in_a_terminal():
    out = Terminal()
    with DownloadProgress("org/name", 3000, out) as progress:
        first, second = (progress.bar_class()(total=total) for total in (1000, 2000))
        with first, second:
            first.update(1000)
            second.update(2500)
            second.update(-500)  # huggingface_hub takes back what it has to fetch anew
    assert "org/name: 100%" in out.getvalue() and "3.00k/3.00k" in out.getvalue()


def test_what_an_earlier_attempt_left_counts():
    out = Terminal()
    with DownloadProgress("org/name", 1000, out) as progress:
        progress.bar_class()(total=1000, initial=400).update(600)
    assert "100%" in out.getvalue()


def test_after_a_stop_no_file_goes_on():
    with DownloadProgress("org/name", 10, io.StringIO()) as progress:
        bar = progress.bar_class()()
        progress.stop()
        with pytest.raises(DownloadStopped):
            bar.update(1)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (98_362_432, "98.4 MB"), (1.52e10, "15.2 GB")],
)
def test_sizes(num_bytes, text):
    assert size(num_bytes) == text
