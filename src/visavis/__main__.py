"""``python -m visavis`` is ``visavis``."""

from visavis.cli import main

if __name__ == "__main__":
    main()
