"""``python -m outcore``: the command line, for where no script is on the path."""

from outcore.cli import main

main()
