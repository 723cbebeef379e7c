"""From a drafter in service to its successor, in one command: drift of the engine's records, another calibration or
training on logged requests, export, doctor, and a paired comparison with the drafter in service.

    python launch/closed_loop.py run.dir=runs/tiny records=service.jsonl requests=requests.jsonl \\
        endpoint=http://127.0.0.1:8000 'serve="vllm serve TARGET --port 8000 --speculative-config ..."'

Exit code 0: done, 4: the doctor found a fault in the served successor.
"""

from deepspec.cli import main

if __name__ == "__main__":
    main("closed_loop")
