"""`python -m jaxllm.generate`: the command lives in `jaxllm.cli.generate`."""

import sys

from jaxllm.cli.generate import main

if __name__ == "__main__":
    sys.exit(main())
