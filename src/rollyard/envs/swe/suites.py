"""How the tests of well-known repositories are run, for rows that do not say it.

Newer SWE-bench rows bring their own `eval_script` and `log_parser`, and swebench itself has no table of commands any
more. Older rows and SWE-Gym's name only the repository: these are its commands. Anything else says `test_command`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Suite:
    """`test_command` is run in the repository; {test_files} are those of the test patch. `log_parser` is swebench's."""

    test_command: str
    log_parser: str


def _pytest(log_parser: str = "parse_log_pytest", options: str = "-rA") -> Suite:
    return Suite(f"python -m pytest {options} {{test_files}}", log_parser)


SUITES: dict[str, Suite] = {
    # SWE-bench
    "astropy/astropy": _pytest("parse_log_astropy", "-rA -vv -o console_output_style=classic --tb=no"),
    "django/django": Suite(
        "LANG=en_US.UTF-8 LC_ALL=en_US.UTF-8 PYTHONIOENCODING=utf8 ./tests/runtests.py --verbosity 2"
        " --settings=test_sqlite --parallel 1 {test_files}",
        "parse_log_django",
    ),
    "matplotlib/matplotlib": _pytest("parse_log_matplotlib"),
    "mwaskom/seaborn": _pytest("parse_log_seaborn", "--no-header -rA"),
    "pallets/flask": _pytest("parse_log_flask"),
    "psf/requests": _pytest("parse_log_requests"),
    "pydata/xarray": _pytest("parse_log_xarray"),
    "pylint-dev/pylint": _pytest("parse_log_pylint"),
    "pytest-dev/pytest": _pytest(),
    "scikit-learn/scikit-learn": _pytest("parse_log_scikit"),
    "sphinx-doc/sphinx": Suite("tox --current-env -epy39 -v -- {test_files}", "parse_log_sphinx"),
    "sympy/sympy": Suite(
        "PYTHONWARNINGS=ignore::UserWarning,ignore::SyntaxWarning bin/test -C --verbose {test_files}",
        "parse_log_sympy",
    ),
    # SWE-Gym, but for mypy, whose tests are chosen by names in data files
    "Project-MONAI/MONAI": _pytest(),
    "bokeh/bokeh": _pytest(options="-rA -n0"),
    "conan-io/conan": _pytest(options="-rA -n0"),
    "dask/dask": _pytest(options="-rA -n0 --color=no"),
    "facebookresearch/hydra": _pytest(options="-rA --tb=long"),
    "getmoto/moto": _pytest(options="-rA -n0"),
    "iterative/dvc": _pytest(),
    "modin-project/modin": _pytest(options="-rA -n0"),
    "pandas-dev/pandas": _pytest(options="-rA --tb=long -n0"),
    "pydantic/pydantic": _pytest(options="-rA --tb=short -vv -o console_output_style=classic --no-header"),
}
