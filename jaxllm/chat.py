"""`python -m jaxllm.chat`: the command lives in `jaxllm.cli.chat`."""

import sys

from jaxllm.cli.chat import main

if __name__ == "__main__":
    sys.exit(main())
