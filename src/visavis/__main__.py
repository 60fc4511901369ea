"""Entry point of ``python -m visavis``, which is the same as ``visavis``."""

from visavis.cli import main

if __name__ == "__main__":
    main()
