"""What a model takes on TPUs and GPUs that are not here: `python scripts/aot_compile.py --help`."""

import sys

from jaxllm.aot.cli import main

if __name__ == "__main__":
    sys.exit(main())
