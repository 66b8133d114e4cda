"""Which blocks hold a prompt's beginning already, and when a request's own blocks may be found by others."""

from jaxllm.engine.schedule.block_pool import BlockPool, Key
from jaxllm.engine.schedule.sequence import Request


class PrefixCache:
    """Keys of requests' full blocks, over a pool that remembers which block has which key.

    A block can be found once the step that writes it was dispatched in an earlier plan, and its tokens are known: a
    prompt's blocks after their chunk was planned, a generated block when its last token is committed.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool):
        self.pool, self.enabled = pool, enabled
        self._writing: dict[Key, Request] = {}  # blocks that a running prefill has yet to write

    def find(self, request: Request) -> list[int] | None:
        """The cached blocks that a waiting request begins with. None: a running prefill is about to write the next."""
        if not (self.enabled and request.reads_prefix_cache):
            return []
        if request.key_generation != self.pool.generation:
            request.keys.clear()
            request.key_generation = self.pool.generation
        self._extend(request, request.num_tokens)
        num_usable = (request.num_tokens - 1) // self.pool.block_size  # the last token must be computed, for its logits
        hits = self.pool.lookup(request.keys[:num_usable])
        if len(hits) < num_usable and request.keys[len(hits)] in self._writing:
            return None
        return hits

    def begin(self, request: Request) -> None:
        """The request was admitted: it will write what it did not find."""
        for key in request.keys[request.num_keyed :]:
            self._writing.setdefault(key, request)

    def offer(self, request: Request, num_tokens: int) -> None:
        """Makes the full blocks among the first `num_tokens` tokens findable, unless the cache was dropped since the
        request was admitted: then some of them come from before, from other parameters say."""
        if not self.enabled or request.key_generation != self.pool.generation:
            return
        self._extend(request, num_tokens)
        full = num_tokens // self.pool.block_size
        for i in range(request.num_keyed, full):
            self.pool.register(request.block_ids[i], request.keys[i])
            self._forget(request, i)
        request.num_keyed = full

    def end(self, request: Request) -> None:
        """The request leaves its blocks: nobody need wait for what it has not written."""
        for i in range(request.num_keyed, len(request.keys)):
            self._forget(request, i)

    def reset(self) -> None:
        """Nothing is running any more."""
        self._writing.clear()

    def _forget(self, request: Request, i: int) -> None:
        if self._writing.get(request.keys[i]) is request:
            del self._writing[request.keys[i]]

    def _extend(self, request: Request, num_tokens: int) -> None:
        block_size, keys = self.pool.block_size, request.keys
        for i in range(len(keys), num_tokens // block_size):
            tokens = request.token_ids(i * block_size, (i + 1) * block_size)
            keys.append(self.pool.key(keys[-1] if keys else self._root(request), tokens))

    def _root(self, request: Request) -> Key:
        """The parent of the first block's key: who does not know the salt can't find out what was asked before."""
        salt = request.params.cache_salt
        return b"" if salt is None else self.pool.key(b"", (), salt.encode("utf-8", "surrogatepass"))

    def check(self, running: list[Request]) -> None:
        assert set(self._writing.values()) <= set(running)
