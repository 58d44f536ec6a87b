"""``python -m collapipe.cli.child PARENT COMMAND…`` runs ``collapipe COMMAND…``.

It ends when the process PARENT ends.
"""

import sys

from collapipe.cli.app import main
from collapipe.process.allocator import share_heap
from collapipe.process.children import end_with_parent

if __name__ == "__main__":
    share_heap()  # before the process has threads
    end_with_parent(int(sys.argv.pop(1)))
    main()
