"""./download.sh with a table of small packs, for processes that tests kill: PACKS.json WORDS..."""

import json
import os
import sys
from pathlib import Path

from launcher.__main__ import main
from launcher.weights import command, hub, packs

packs.PACKS = tuple(packs.Pack(**row) for row in json.loads(Path(sys.argv[1]).read_text()))
hub.FIRST_WAIT_S = 0.01
command.REPOSITORY = Path(os.environ["HOME"])  # no env file of a developer's checkout takes part
sys.exit(main(["cluster", "download.sh", "weights", *sys.argv[2:]]))
