"""Each mask has a fresh seed: a keeper that knows one knows no other, of another keeper, node, round or try."""

from itertools import product

import numpy as np
from keeper_openings import SIZE, agreement_of

from fedcgd.keepers import KeeperKey, Keepers, mask


def test_no_two_masks_have_one_seed() -> None:
    """One seed for all keepers passes every sum and every test of uniformity, and any keeper alone opens each node."""
    keepers = Keepers.simulation(7, 3, colluding=1)
    agreement = agreement_of(keepers)
    keys = {keepers.card_of(key).name: key for key in (KeeperKey.simulation(7, number) for number in range(3))}
    seeds, tickets = [], []
    for round, attempt, _node in product(range(2), repeat=3):
        sent = mask(np.zeros(SIZE, np.int64), agreement, round=round, attempt=attempt, present=keepers.names)
        info = agreement.info(round, attempt, keepers.names) + sent.ticket
        seeds += [keys[name].open(sealed, info) for name, sealed in sent.sealed.items()]
        tickets.append(sent.ticket)
    assert len(set(seeds)) == len(seeds) == 3 * 8
    assert len(set(tickets)) == 8
