"""Groups that take the place of gloo or NCCL in tests, by the name of their backend."""

from tests.support.groups import GroupOverGloo
from tests.support.staged import StagedGroup, StagedGroupOnCuda
from tests.support.worst_case import WORST_CASES

TRANSPORTS: dict[str, type[GroupOverGloo]] = {
    **WORST_CASES,
    **{group.backend: group for group in (StagedGroup, StagedGroupOnCuda)},
}
