"""`python -m fusecomp`."""

from fusecomp.cli import main

if __name__ == "__main__":
    main()
