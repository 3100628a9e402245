"""`python -m torchmuster` and the command `muster`."""

from torchmuster.cli.main import main

if __name__ == "__main__":
    main()
