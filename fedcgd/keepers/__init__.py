"""Keepers: parties that each add a share of the noise, so that no single machine sees a sum or can remove the noise.

Nodes add one mask for each keeper to their clipped integers and seal the mask's seed to that keeper (`masks`). The server adds
what arrives; each keeper answers once a round with minus its masks plus its share of the noise (`keeper`), after it has recorded
the round durably (`record`). Who the keepers are is in a file that all parties hold (`cards`), and what a run is, in an agreement
that every sealed seed is bound to (`agreement`). Nothing here knows how messages travel: bytes in, bytes out.
"""

from fedcgd.keepers.agreement import EVALUATION, TRAINING, Agreement, Kind, Sums, agree, sums_of
from fedcgd.keepers.identities import Card, KeeperKey, Keepers
from fedcgd.keepers.keeper import Keeper, Opening, Refusal, RefusedError
from fedcgd.keepers.masks import Masked, add, lifted, mask
from fedcgd.keepers.participations import NodeParticipations
from fedcgd.keepers.tls import Tls

__all__ = [
    "EVALUATION",
    "TRAINING",
    "Agreement",
    "Card",
    "Keeper",
    "KeeperKey",
    "Keepers",
    "Kind",
    "Masked",
    "NodeParticipations",
    "Opening",
    "Refusal",
    "RefusedError",
    "Sums",
    "Tls",
    "add",
    "agree",
    "lifted",
    "mask",
    "sums_of",
]
