"""`python -m jaxllm.bench`: measurements of the engine, as text or JSON."""

import argparse
import json


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxllm.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    steps = commands.add_parser("steps", help="host time of a decode step by number of running requests")
    steps.add_argument("--running", type=int, nargs="+", default=[1, 16, 64, 128, 256], metavar="N")
    steps.add_argument("--steps", type=int, default=200, help="decode steps measured for each N (default 200)")
    steps.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args(argv)

    from jaxllm.bench.steps import measure, table

    rows = measure(args.running, args.steps)
    print(json.dumps({"steps": rows}) if args.json else table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
