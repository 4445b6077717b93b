"""What is in `inside` needs torch, which this environment need not have: test_inside.py runs it elsewhere."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") else ["inside"]
