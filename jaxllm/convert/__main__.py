"""`python -m jaxllm.convert`: the command lives in `jaxllm.cli.convert`."""

import sys

from jaxllm.cli.convert import main

if __name__ == "__main__":
    sys.exit(main())
