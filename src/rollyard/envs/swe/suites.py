"""How to run the tests of well-known repositories, for rows that do not contain it.

Newer SWE-bench rows contain their own `eval_script` and `log_parser`, and swebench itself no longer has a table of
commands. Older rows, and those of SWE-Gym, contain only the repository and a version: these are the commands that the
harnesses of both used, up to swebench 4, with their differences by version. For a version or a repository that is not
listed, the row must contain `test_command`.

Packages are not installed again, except those that were copied into the image's Python: otherwise the tests
would run without the solution. Compiled parts remain those of the image.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Suite:
    """`test_command` runs in the repository; {test_files} is replaced by the test patch's files. `log_parser` is one of
    swebench's. `runner_files` are files of the repository that decide how tests run: not part of a solution."""

    test_command: str
    log_parser: str
    runner_files: tuple[str, ...] = ()


def suite_of(repo: str, version: str) -> Suite | None:
    """The suite of the repository at that version, or None if it is not listed."""
    suites = SUITES.get(repo, {})
    number = _number(version)
    selected = suites.get("")
    for since, suite in suites.items():
        if since and number and _number(since) <= number:
            selected = suite
    return selected


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _pytest(log_parser: str = "parse_log_pytest", options: str = "-rA") -> Mapping[str, Suite]:
    """The same command for all versions."""
    return {"": Suite(f"pytest {options} {{test_files}}", log_parser)}


def _django(before: str = "", options: str = " --settings=test_sqlite --parallel 1") -> Suite:
    return Suite(
        "export LANG=en_US.UTF-8 LC_ALL=en_US.UTF-8 LANGUAGE=en_US:en PYTHONIOENCODING=utf8; "
        f"{before}./tests/runtests.py --verbosity 2{options} {{test_files}}",
        "parse_log_django",
        ("tests/runtests.py", "tests/test_sqlite.py"),
    )


_INSTALL = "python setup.py install >/dev/null 2>&1; "
_LOCALE = "sed -i '/en_US.UTF-8/s/^# //g' /etc/locale.gen && locale-gen >/dev/null 2>&1; "

SUITES: Mapping[str, Mapping[str, Suite]] = {
    # SWE-bench: by the first version of each command, in order
    "astropy/astropy": {
        "0.1": Suite(
            "pytest -rA -vv -o console_output_style=classic --tb=no {test_files}",
            "parse_log_astropy",
        ),
        "3.0": _pytest("parse_log_astropy")[""],
    },
    "django/django": {
        "1.9": _django(_INSTALL, ""),
        "1.10": _django(_INSTALL),
        "3.0": _django(_LOCALE),
        "4.0": _django(),
    },
    "marshmallow-code/marshmallow": _pytest("parse_log_marshmallow"),
    "matplotlib/matplotlib": {"3.0": _pytest("parse_log_matplotlib")[""]},
    "mwaskom/seaborn": _pytest("parse_log_seaborn", "--no-header -rA"),
    "pallets/flask": _pytest("parse_log_flask"),
    # `python -m` imports the package from the folder, not the installed copy
    "psf/requests": {"": Suite("python -m pytest -rA {test_files}", "parse_log_requests")},
    "pvlib/pvlib-python": _pytest("parse_log_pvlib"),
    "pydata/xarray": _pytest("parse_log_xarray"),
    "pydicom/pydicom": _pytest("parse_log_pydicom"),
    "pylint-dev/astroid": _pytest("parse_log_astroid"),
    "pylint-dev/pylint": _pytest("parse_log_pylint"),
    "pytest-dev/pytest": _pytest(),
    "pyvista/pyvista": _pytest("parse_log_pyvista"),
    "scikit-learn/scikit-learn": _pytest("parse_log_scikit"),
    "sphinx-doc/sphinx": {"": Suite("tox --current-env -epy39 -v -- {test_files}", "parse_log_sphinx")},
    "sqlfluff/sqlfluff": _pytest("parse_log_sqlfluff"),
    "sympy/sympy": {
        "": Suite(
            "PYTHONWARNINGS=ignore::UserWarning,ignore::SyntaxWarning bin/test -C --verbose {test_files}",
            "parse_log_sympy",
            ("bin/test", "sympy/testing/runtests.py", "sympy/utilities/runtests.py"),
        )
    },
    # SWE-Gym, except mypy, whose tests are selected by names in data files
    "Project-MONAI/MONAI": _pytest(),
    "bokeh/bokeh": _pytest(options="-rA -n0"),
    "conan-io/conan": {
        "": Suite("PYTHONPATH=${PYTHONPATH:-}:$PWD pytest -n0 -rA {test_files}", "parse_log_pytest"),
    },
    "dask/dask": _pytest(options="-n0 -rA --color=no"),
    "facebookresearch/hydra": _pytest(options="-rA --tb=long"),
    "getmoto/moto": _pytest(options="-n0 -rA"),
    "iterative/dvc": _pytest(),
    "modin-project/modin": _pytest(options="-n0 -rA"),
    "pandas-dev/pandas": _pytest(options="-rA --tb=long"),
    # its pytest-pretty prints no summary: the outcomes are those of -vv, after the names
    "pydantic/pydantic": _pytest(
        "parse_log_pytest_v2", "-rA --tb=short -vv -o console_output_style=classic --no-header"
    ),
}
