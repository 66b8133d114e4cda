"""`python -m jaxllm.eval`: the command lives in `jaxllm.cli.eval`."""

import sys

from jaxllm.cli.eval import main

if __name__ == "__main__":
    sys.exit(main())
