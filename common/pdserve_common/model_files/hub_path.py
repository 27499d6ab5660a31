"""hf://OWNER/NAME@REVISION: a folder of the Hugging Face hub."""

from dataclasses import dataclass

from pdserve_common.model_files.model_folder import is_hub_id, is_revision

SCHEME = "hf://"
MAX_REVISION_CHARS = 255
_MAX_SHOWN = 60
_COMMIT_CHARS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPath:
    """A repository's root folder at one revision."""

    # OWNER/NAME
    repository: str
    # A branch, a tag or a commit.
    revision: str

    @classmethod
    def parse(cls, path: str) -> "HubPath":
        """Raises ValueError for what is no such path."""
        repository, separator, revision = path.removeprefix(SCHEME).partition("@")
        is_path = (
            is_hub_path(path)
            and is_hub_id(repository)
            and len(revision) <= MAX_REVISION_CHARS
            and is_revision(revision)
        )
        if not is_path:
            missing = "" if separator else ", whose revision is missing"
            raise ValueError(
                f"{path[:_MAX_SHOWN]!r}{missing}, must be {SCHEME}OWNER/NAME@REVISION with a "
                "branch, a tag or a commit"
            )
        return cls(repository=repository, revision=revision)

    @property
    def is_commit(self) -> bool:
        """Does its content stay the same for ever?"""
        return is_commit(self.revision)

    def __str__(self) -> str:
        return f"{SCHEME}{self.repository}@{self.revision}"


def is_hub_path(path: str) -> bool:
    """Is it meant to be one?"""
    return path.startswith(SCHEME)


def is_commit(revision: str) -> bool:
    """Is it a commit's whole hash, in hex?"""
    return len(revision) == _COMMIT_CHARS and set(revision) <= set("0123456789abcdef")
