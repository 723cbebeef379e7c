"""Write, and prove, what a serving engine loads.

    python launch/export_drafter.py run.dir=runs/tiny 'export.formats=[deepspec,speculators]'
"""

from deepspec.cli import main

if __name__ == "__main__":
    main("export_drafter")
