"""``python -m hps.cli``: the command line where the ``hps`` script is not on the path."""

from hps.cli.main import main

main()
