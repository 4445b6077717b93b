"""What EVAL `same` does not take over from RUN, and the environment variables that its commands start with.

RUN's files are judged; what *executes* the judging must not be RUN's. So these paths are as the image (and the set-up)
had them: the programs in PATH, interpreters and their packages, libraries and the loader's files, and whatever a
shell, Python or git reads by itself before it does what it was told.

What stays RUN's, and must not be trusted: everything else, the workspace first. A virtual environment in the workspace,
a `conftest.py`, a Makefile, `package.json`: a check that runs these runs the agent's code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from posixpath import isabs, normpath

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
    "protocol.ext.allow": "never",
    "safe.directory": "*",  # the files are another user's; with no hooks there is nothing in them to be safe from
}
"""Wins over a repository's own configuration, which is RUN's. Its filters and external diff programs need a
`.gitattributes`; a check that trusts those runs the agent's code."""

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


def search_paths(env: Mapping[str, str]) -> Iterator[str]:
    """The folders that an environment's own variables have programs and packages looked for in."""
    for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "NODE_PATH", "PERL5LIB", "PYTHONHOME"):
        for path in env.get(name, "").split(":"):
            if isabs(path) and normpath(path) != "/":
                yield normpath(path)
