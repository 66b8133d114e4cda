"""`python -m jaxllm.bench`: the command lives in `jaxllm.cli.bench`."""

import sys

from jaxllm.cli.bench import main

if __name__ == "__main__":
    sys.exit(main())
