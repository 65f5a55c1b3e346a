"""Small files in the format of IMDB."""

REVIEWS = {"neg": "A dull film.<br /><br />Very dull.", "pos": "A fine film! Café."}


def write_imdb(folder, count=10):
    for part in ("train", "test"):
        for label, text in REVIEWS.items():
            place = folder / "aclImdb" / part / label
            place.mkdir(parents=True)
            for i in range(count):
                (place / f"{i}_{3 if label == 'neg' else 8}.txt").write_text(f"{text} {i}", encoding="utf-8")
    (folder / "aclImdb" / "train" / "unsup").mkdir()
