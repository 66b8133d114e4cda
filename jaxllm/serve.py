"""`python -m jaxllm.serve`: the command lives in `jaxllm.cli.serve`."""

import sys

from jaxllm.cli.serve import main

if __name__ == "__main__":
    sys.exit(main())
