"""What EVAL `same` does not take over from RUN, and the environment variables that its commands start with.

RUN's files are judged; what *executes* the judging must not be RUN's. So these paths are as the image (and the set-up)
had them: the programs in PATH with the libraries beside them, interpreters and their packages, the loader's files, and
whatever a shell, Python or git reads by itself before it does what it was told.

What stays RUN's, and must not be trusted: everything else, the workspace first, even where PYTHONPATH names it. A
`conftest.py`, a Makefile, `package.json`, a virtual environment that PATH does not name: a check that runs these runs
the agent's code. So does one that runs a program of the image's that is a link to a place not named here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from posixpath import commonpath, isabs, join, normpath, split

from rollyard.sandbox.base import WORKDIR

HOMES = ("/root", "/home/agent")

_SYSTEM = (
    "/usr /bin /sbin /lib /lib32 /lib64 /libx32 /etc /opt /nix /snap /home/linuxbrew /boot /.rollyard"
    # Apptainer runs these scripts for the image's variables
    " /.singularity.d /environment /singularity /.exec /.run /.shell /.test"
)

_HOME_FILES = (
    # shells
    ".bashrc .bash_profile .bash_login .bash_logout .bash_aliases .profile .inputrc .zshrc .zshenv .zprofile .zlogin"
    " .config .pam_environment .terminfo"
    # programs and packages of one user
    " .local bin .cargo .rustup .go go .nvm .npm .npmrc .npm-global .node_modules .yarnrc .pyenv .conda .condarc"
    " miniconda3 anaconda3 .rbenv .gem .bundle .gemrc .rvm .sdkman .m2 .gradle .jenv .asdf .deno .bun .opam"
    " .ghcup .cabal"
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
    "safe.directory": "*",  # the files are another user's; with no hooks there is nothing in them to be safe from
}
"""Wins over a repository's own configuration, which is RUN's. What git lets nobody overrule stays RUN's:
`diff.external`, and the filters, text converters and merge drivers that a `.gitattributes` names. So `git diff` and
`git add` in the agent's repository run the agent's code, unless a check says `--no-ext-diff --no-textconv`."""

EVAL_ENV: Mapping[str, str] = {
    "PYTHONNOUSERSITE": "1",
    "PYTHONSAFEPATH": "1",  # the current folder, the agent's, is not where imports are looked for first
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
"""Over the image's variables, under the plan's own `env`: an environment that wants one otherwise says so there."""


_BESIDE = ("lib", "lib64", "libexec", "pyvenv.cfg", "conda-meta")
"""What the programs of a `bin` read beside it: a virtual environment in PATH is its packages, too."""


def search_paths(env: Mapping[str, str]) -> Iterator[str]:
    """Where an environment's own variables have programs and packages looked for. Never the work itself."""
    for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "NODE_PATH", "PERL5LIB", "PYTHONHOME"):
        for path in map(_plain, filter(isabs, env.get(name, "").split(":"))):
            if not _holds_the_work(path):
                yield path
            above, last = split(path)
            if name == "PATH" and last in ("bin", "sbin") and not _holds_the_work(above):
                yield from (join(above, beside) for beside in _BESIDE)


def home_paths(env: Mapping[str, str]) -> Iterator[str]:
    """The start-up files and programs of a home that an environment's own variables name."""
    home = _plain(env.get("HOME") or "/")
    if home != "/":
        names = _HOME_FILES.split()
        yield from (join(home, name) for name in names if name.startswith(".") or not _holds_the_work(home))


def _plain(path: str) -> str:
    return normpath(f"/{path.lstrip('/')}")  # normpath alone keeps two leading slashes


def _holds_the_work(path: str) -> bool:
    """The workspace, or a folder above it: taken back, there would be nothing to judge."""
    return commonpath((path, WORKDIR)) == path
