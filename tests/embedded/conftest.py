"""What is in `inside` needs torch and more, which this environment need not have: test_inside.py runs it elsewhere,
without this file. Also where torch is here (`make demo` installs it): once is enough."""

collect_ignore = ["inside"]
