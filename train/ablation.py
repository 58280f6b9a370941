"""``python -m train.ablation``."""

import sys

from train.sdsat.ablation import main

if __name__ == "__main__":
    sys.exit(main())
