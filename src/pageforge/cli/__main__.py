"""`python -m pageforge.cli` is `pageforge`."""

from pageforge.cli.app import main

if __name__ == "__main__":
    main()
