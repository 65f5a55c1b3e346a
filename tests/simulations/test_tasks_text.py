"""IMDB and tweets from files in the true formats, the errors without them, and text as tensors."""

import hashlib

import numpy as np
import pytest
import torch
from imdb_files import write_imdb
from small_models import small_minilm

from fedcgd_simulations import minilm
from fedcgd_simulations.minilm import minilm_embeddings
from fedcgd_simulations.models import last_block
from fedcgd_simulations.models.last_block import minilm_last_block
from fedcgd_simulations.task import Examples
from fedcgd_simulations.tasks import get_task, tweets, tweets_3000
from fedcgd_simulations.tasks.tweets import FILE, read_tweets
from fedcgd_simulations.text import hashed_bag, hashed_tokens, tokens_for


@pytest.mark.parametrize("place", ["", "aclImdb"])
def test_imdb_reads_one_file_per_review(tmp_path, place):
    write_imdb(tmp_path)
    data = get_task("imdb", data_dir=tmp_path / place).load()
    assert [len(part) for part in (data.train, data.validation, data.test)] == [18, 2, 20]
    assert data.test.targets.tolist() == [0] * 10 + [1] * 10
    assert data.test.inputs.shape == (20, 256)
    dull = hashed_tokens(["A dull film.  Very dull. 0"], vocabulary=8192, length=256)
    assert torch.equal(data.test.inputs[0], dull[0])


def test_other_models_get_other_inputs(tmp_path):
    write_imdb(tmp_path)
    assert get_task("imdb", model="softmax", data_dir=tmp_path).load().test.inputs.shape == (20, 4096)
    with pytest.warns(UserWarning, match="bert-tiny"):
        data = get_task("imdb", model="bert-tiny-lora", data_dir=tmp_path).load()
    assert int(data.test.inputs.max()) < 30522


def write_tweets(folder):
    lines = [b"sentiment,confidence,text"]
    for i in range(24):
        sentiment = (b"negative", b"neutral", b"positive")[i % 3]
        lines.append(sentiment + b',0.5,"Tweet ""%d"", quoted"' % i)
    lines += [b"neutral,1,Tweet cut \xd1", b'positive,0.5,"Tweet ""0"", quoted"']
    (folder / FILE).write_bytes(b"\r\n".join(lines))


def test_tweets_are_read_once_each(tmp_path):
    write_tweets(tmp_path)
    texts, labels = read_tweets(tmp_path / FILE)
    assert texts[0].split('"')[1::2] == ["0"]
    assert texts[-1].startswith("Tweet cut")
    assert labels == [0, 1, 2] * 8 + [1]
    data = get_task("tweets", model="softmax", data_dir=tmp_path).load()
    assert [len(part) for part in (data.train, data.validation, data.test)] == [19, 2, 4]
    assert torch.allclose(data.train.inputs.norm(dim=1), torch.ones(19))
    assert get_task("tweets", model="lstm", data_dir=tmp_path).load().test.inputs.shape == (4, 24)


def test_the_shipped_tweets():
    """Counts from the file itself: 38,157 rows of which 37,243 texts differ."""
    data = get_task("tweets", model="lstm").load()
    assert [len(part) for part in (data.train, data.validation, data.test)] == [27933, 3103, 6207]
    targets = torch.cat([part.targets for part in (data.train, data.validation, data.test)])
    assert sorted(set(targets.tolist())) == [0, 1, 2]


def test_a_table_without_the_columns_is_refused(tmp_path):
    (tmp_path / FILE).write_text("label,tweet\n1,hello\n")
    with pytest.raises(ValueError, match=r"columns sentiment"):
        get_task("tweets", data_dir=tmp_path).load()


def test_hashed_words_are_the_same_for_everybody():
    tokens = hashed_tokens(["The cat, the CAT", ""], vocabulary=100, length=6)
    row = tokens[0].tolist()
    assert row[0] == row[3]
    assert row[1] == row[4]
    assert row[5] == 0
    assert min(row[:5]) >= 1
    assert not tokens[1].any()
    # BLAKE2b of b"the" with 8 bytes, big-endian, modulo 99, plus 1
    assert row[0] == 1 + int.from_bytes(hashlib.blake2b(b"the", digest_size=8).digest(), "big") % 99


def test_word_pieces_come_from_the_pretrained_folder(tmp_path):
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "film", "##s", "dull"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    tokens = tokens_for(tmp_path, ["dull films", "other"], vocabulary=30522, length=6)
    assert tokens.tolist() == [[2, 7, 5, 6, 3, 0], [2, 1, 3, 0, 0, 0]]


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """Embeddings that say how often they were made, kept in `tmp_path`."""
    calls = []

    def embed(texts, *, length):
        calls.append(list(texts))
        return torch.arange(384.0 * len(texts)).reshape(len(texts), 384) + length

    monkeypatch.setenv("FEDCGD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(minilm, "embed", embed)
    return calls


def test_embeddings_are_made_once_for_the_same_texts(tmp_path, counted):
    first, again = minilm_embeddings(["a", "b"]), minilm_embeddings(["a", "b"])
    assert torch.equal(first, again)
    assert first.dtype == torch.float32
    assert float(again[1, 3]) == 384 + 3 + 64
    others = [(["b", "a"], 64), (["ab"], 64), (["a", "b"], 32), (["a", "", "b"], 64)]
    for texts, length in others:
        minilm_embeddings(texts, length=length)
    assert counted == [["a", "b"], *(texts for texts, _ in others)]
    assert len(list((tmp_path / "cache").iterdir())) == 5


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00", "cut", "other"])
def test_damaged_embeddings_are_made_again(tmp_path, counted, content):
    minilm_embeddings(["a", "b"])
    (file,) = (tmp_path / "cache").iterdir()
    if content == "other":
        np.save(file, np.zeros((3, 384), dtype=np.float32))
    else:
        file.write_bytes(file.read_bytes()[:200] if content == "cut" else content)
    assert float(minilm_embeddings(["a", "b"])[0, 0]) == 64
    assert len(counted) == 2


def starts_as_the_embeddings(texts, length):
    """The last block on kept states gives MiniLM's embeddings; padding is zero, and makes no difference."""
    model = minilm_last_block(3).eval()
    states = minilm.states_below(texts, length=length).float()
    seen = []
    model.head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        assert not model(states).any()
    unit = torch.nn.functional.normalize(seen[0], dim=1)
    assert torch.allclose(unit, minilm.embed(texts, length=length), atol=3e-3)
    return states


def test_the_last_block_starts_where_the_embeddings_are(monkeypatch):
    small = small_minilm(30522)
    monkeypatch.setattr(minilm, "WIDTH", 16)
    for module in (minilm, last_block):
        monkeypatch.setattr(module, "minilm_model", lambda: small)
    states = starts_as_the_embeddings(["Rain.", "A much longer text about the weather in Oslo.", "Sun and rain."], 6)
    assert states.shape == (3, 6, 16)
    # [CLS], rain, the full stop, [SEP], and then nothing
    assert states.any(dim=2).sum(dim=1).tolist()[:2] == [4, 6]


@pytest.mark.parametrize(("model", "read"), [(None, "minilm_states"), ("minilm", "minilm_embeddings")])
def test_only_the_tweets_that_are_chosen_are_read_and_each_keeps_its_label(tmp_path, monkeypatch, model, read):
    write_tweets(tmp_path)
    asked = []

    def numbers(texts, *, length):
        asked.append((texts, length))
        return torch.tensor([[float(texts_of.index(text))] for text in texts])

    texts_of, labels = read_tweets(tmp_path / FILE)
    monkeypatch.setattr(tweets_3000, read, numbers)
    monkeypatch.setattr(tweets_3000, "SIZES", (7, 1, 3))
    data = get_task("tweets-3000", model=model, data_dir=tmp_path).load()
    parts = (data.train, data.validation, data.test)
    assert [len(part) for part in parts] == [7, 1, 3]
    rows = [int(row) for part in parts for row in part.inputs]
    assert len(set(rows)) == 11
    assert [labels[row] for row in rows] == [int(label) for part in parts for label in part.targets]
    assert asked == [([texts_of[row] for row in rows], 16)]
    whole = tweets.parts(Examples(torch.arange(25), torch.tensor(labels)))
    for part, known in zip(parts, (whole.train, whole.validation, whole.test), strict=True):
        assert set(part.inputs.flatten().int().tolist()) <= set(known.inputs.tolist())


def test_an_empty_folder_of_reviews_is_refused(tmp_path):
    write_imdb(tmp_path, count=0)
    with pytest.raises(ValueError, match="no reviews"):
        get_task("imdb", data_dir=tmp_path).load()


def test_a_bag_of_words_forgets_length_but_not_words():
    bag = hashed_bag(["good film", "good film good film", "bad food"], features=512)
    assert torch.allclose(bag.norm(dim=1), torch.ones(3))
    assert float(bag[0] @ bag[1]) > 0.8
    assert abs(float(bag[0] @ bag[2])) < 0.3
