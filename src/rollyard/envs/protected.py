"""The paths that EVAL `same` does not take over from RUN, and the environment variables of its commands.

EVAL scores RUN's files but must not *execute* them. So these paths are as the image and the set-up left them: the
programs in PATH with the libraries beside them, interpreters and their packages, the loader's files, and the start-up
files that a shell, Python or git reads by itself.

Everything else is RUN's and must not be trusted, above all the workspace, even if PYTHONPATH names it. A check that
runs a `conftest.py`, a Makefile, `package.json` or a virtual environment that PATH does not name runs the agent's code.
So does a check that runs a program of the image that is a link to a path not listed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from posixpath import commonpath, isabs, join, normpath, split

from rollyard.sandbox.base import WORKDIR

HOMES = ("/root", "/home/agent")

_SYSTEM = (
    "/usr /bin /sbin /lib /lib32 /lib64 /libx32 /etc /opt /nix /snap /home/linuxbrew /boot /.rollyard"
    # Apptainer runs these scripts to set the image's variables
    " /.singularity.d /environment /singularity /.exec /.run /.shell /.test"
)

_HOME_FILES = (
    # shells
    ".bashrc .bash_profile .bash_login .bash_logout .bash_aliases .profile .inputrc .zshrc .zshenv .zprofile .zlogin"
    " .config .pam_environment .terminfo"
    # a user's programs and packages
    " .local bin .cargo .rustup .go go .nvm .npm .npmrc .npm-global .node_modules .yarnrc .pyenv .conda .condarc"
    " miniconda3 anaconda3 .rbenv .gem .bundle .gemrc .rvm .sdkman .m2 .gradle .jenv .asdf .deno .bun .opam"
    " .ghcup .cabal"
    # from which installers run programs, such as uvx its environments
    " .cache/uv .cache/pip .cache/pypoetry .cache/pipx .cache/yarn .cache/pnpm .cache/node .cache/deno .cache/go-build"
    " .cache/bazel .cache/pre-commit"
    # what programs read by themselves
    " .gitconfig .git-credentials .git-templates .pythonrc .pythonrc.py .pydistutils.cfg .pip .pypirc .perldb .Rprofile"
    " .Renviron .irbrc .gdbinit .curlrc .wgetrc .netrc .ssh .gnupg .vimrc .vim .tmux.conf .screenrc .makerc .ant"
)

PROTECTED: tuple[str, ...] = (
    *_SYSTEM.split(),
    *(f"{home}/{name}" for home in HOMES for name in _HOME_FILES.split()),
)

GIT_CONFIG = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.attributesFile": "/dev/null",
    "core.pager": "cat",
    "core.sshCommand": "ssh",
    "log.showSignature": "false",  # with a forged signature, `git log` would start gpg.program
    "commit.gpgSign": "false",
    "tag.gpgSign": "false",
    "gpg.program": "gpg",
    "protocol.ext.allow": "never",
    "safe.directory": "*",  # the files belong to another user; without hooks that is harmless
}
"""Overrides a repository's own configuration, which is RUN's. Git allows no override of `diff.external` and of the
filters, text converters and merge drivers that a `.gitattributes` names. So `git diff` and `git add` in the agent's
repository run the agent's code, unless a check passes `--no-ext-diff --no-textconv`."""

EVAL_ENV: Mapping[str, str] = {
    "PYTHONNOUSERSITE": "1",
    "PYTHONSAFEPATH": "1",  # do not import from the current folder, which is the agent's
    "PYTHONDONTWRITEBYTECODE": "1",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_PAGER": "cat",
    "GIT_CONFIG_COUNT": str(len(GIT_CONFIG)),
    **{f"GIT_CONFIG_KEY_{number}": name for number, name in enumerate(GIT_CONFIG)},
    **{f"GIT_CONFIG_VALUE_{number}": value for number, value in enumerate(GIT_CONFIG.values())},
}
"""These override the image's variables; the plan's `env` overrides these."""


_BESIDE = ("lib", "lib64", "libexec", "pyvenv.cfg", "conda-meta")
"""What the programs in a `bin` read beside it: a virtual environment in PATH includes its packages."""


def search_paths(env: Mapping[str, str]) -> Iterator[str]:
    """Where programs and packages are searched for, by an environment's variables. Never the workspace itself."""
    for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "NODE_PATH", "PERL5LIB", "PYTHONHOME"):
        for path in map(_plain, filter(isabs, env.get(name, "").split(":"))):
            if not _holds_the_work(path):
                yield path
            above, last = split(path)
            if name == "PATH" and last in ("bin", "sbin") and not _holds_the_work(above):
                yield from (join(above, beside) for beside in _BESIDE)


def home_paths(env: Mapping[str, str]) -> Iterator[str]:
    """The start-up files and programs in the home folder that an environment's variables name."""
    home = _plain(env.get("HOME") or "/")
    if home != "/":
        names = _HOME_FILES.split()
        yield from (join(home, name) for name in names if name.startswith(".") or not _holds_the_work(home))


def _plain(path: str) -> str:
    return normpath(f"/{path.lstrip('/')}")  # normpath alone keeps two leading slashes


def _holds_the_work(path: str) -> bool:
    """Whether the path is the workspace or a folder above it: restoring it would remove what is scored."""
    return commonpath((path, WORKDIR)) == path
