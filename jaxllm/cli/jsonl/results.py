"""The results of a JSON lines job: one object per line, written completely or not at all, and read by --resume."""

import json
import sys
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.cli.jsonl.line_file import LineFile
from jaxllm.cli.jsonl.requests import BadJsonlLine, JsonlRequest
from jaxllm.outputs import CompletionOutput, Logprobs, RequestOutput

MAX_LINES = 2**30  # of the input


def output_fields(output: RequestOutput, *, token_ids: bool) -> dict[str, Any]:
    """A request's output for JSON. Token ids are included on request, and where log-probabilities need them."""
    fields: dict[str, Any] = {
        "outputs": [_completion(completion, token_ids=token_ids) for completion in output.outputs],
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "error": output.error,
    }
    if token_ids:
        fields["prompt_token_ids"] = output.prompt_token_ids
    if output.prompt_logprobs is not None:
        fields |= {"prompt_token_ids": output.prompt_token_ids, "prompt_logprobs": _logprobs(output.prompt_logprobs)}
    return fields


def _completion(completion: CompletionOutput, *, token_ids: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_tokens": len(completion.token_ids),
    }
    if token_ids or completion.logprobs is not None:
        fields["token_ids"] = completion.token_ids
    if completion.cumulative_logprob is not None:
        fields["cumulative_logprob"] = completion.cumulative_logprob
    if completion.logprobs is not None:
        fields["logprobs"] = _logprobs(completion.logprobs)
    return fields


def _logprobs(logprobs: Logprobs) -> list[dict[str, Any] | None]:
    return [
        None if position is None else {str(token): logprob._asdict() for token, logprob in position.items()}
        for position in logprobs
    ]


class Results:
    """Writes results to a file, or to standard output for None. Raises `OSError` if the file can't be written, and
    `ValueError` if it has results already, unless `resume` keeps them."""

    def __init__(self, path: Path | None, *, resume: bool = False):
        self.path = path
        self.num_done = 0
        self.last_line = 0  # last input line with a result
        self._done = array("Q")  # digest of each line's result, 0 for none
        self._file = LineFile(path, reads=resume)
        try:
            if resume and path is not None and self._file.size is not None:
                self._find_done(path)
            elif self._file.size:
                raise ValueError(f"{path} has results already; add --resume to continue, or give another --output")
        except BaseException:
            self._file.close()
            raise

    def _find_done(self, path: Path) -> None:
        """Reads the existing results and removes an incomplete last line, which a crash may leave."""
        size = 0
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if not raw.endswith(b"\n"):
                    print(f"{path}: the last line is incomplete, so that its request runs again", file=sys.stderr)
                    self._file.truncate(size)
                    break
                size += len(raw)
                self._note_done(path, number, raw)

    def _note_done(self, path: Path, number: int, raw: bytes) -> None:
        try:
            record = json.loads(raw)
            line, digest = record["line"], int(record["digest"], 16)
            # A failed request runs again; an invalid one, which has no outputs, stays invalid.
            is_settled = record["error"] is None or not record["outputs"]
            if not 0 < line <= MAX_LINES or not 0 <= digest < 2**64:
                raise ValueError(f"line={line!r:.50}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number}, is not a result of this command ({error}); --resume needs the output as it was"
            ) from error
        self.last_line = max(self.last_line, line)
        if is_settled:
            self._done.extend([0] * (line - len(self._done)))
            self.num_done += not self._done[line - 1]
            self._done[line - 1] = digest or 1

    def done(self, line: JsonlRequest | BadJsonlLine) -> bool:
        """Whether the line has a result. Raises `ValueError` if the result belongs to another request."""
        digest = self._done[line.number - 1] if line.number <= len(self._done) else 0
        if digest and digest != (int(line.digest, 16) or 1):
            raise ValueError(
                f"it is not the request that {self.path} has the result of: the input, the model or the options have "
                "changed. Put them back, or give another --output"
            )
        return bool(digest)

    def write(self, line: JsonlRequest | BadJsonlLine, fields: Mapping[str, Any]) -> None:
        record = {"line": line.number, **line.given, **fields, "digest": line.digest}
        self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")

    def __enter__(self) -> "Results":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
