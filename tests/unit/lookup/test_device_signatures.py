"""Which requests of a GPU's lookups are of a repeatable form."""

import numpy as np
import pytest

from hps.lookup.gpu.prepared_lookups import request_signature
from hps.types import JaggedKeys

KEYS = np.arange(20)


def test_plain_keys_have_a_signature():
    assert request_signature({"f": JaggedKeys(KEYS, 10)}) == (("f", 20, 10, True),)
    assert request_signature({"f": JaggedKeys(np.arange(6)[::3][:1], 1)}) == (("f", 1, 1, True),)


@pytest.mark.parametrize(
    "keys",
    [
        JaggedKeys(np.arange(40)[::2], 20),
        JaggedKeys(KEYS.astype(np.int32), 20),
        JaggedKeys(KEYS[:0], 0),
        JaggedKeys(KEYS, 2, np.array([0, 10, 20])),
        JaggedKeys(KEYS, 20, None, np.ones(20, np.float32)),
    ],
    ids=["strided", "int32", "none", "offsets", "weights"],
)
def test_other_keys_have_none(keys):
    assert request_signature({"f": keys}) is None
