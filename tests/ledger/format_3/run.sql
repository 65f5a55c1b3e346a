BEGIN TRANSACTION;
CREATE TABLE attempts (
    id INTEGER PRIMARY KEY,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    nonce BLOB CHECK (length(nonce) = 16),
    state TEXT NOT NULL CHECK (state IN ('planned', 'aggregated', 'opening', 'released', 'spent', 'abandoned')),
    users BLOB NOT NULL,
    planned TEXT NOT NULL,
    aggregated TEXT,
    ended TEXT,
    UNIQUE (round, attempt)
) STRICT;
INSERT INTO "attempts" VALUES(1,0,0,X'F011524EF01E0F5A93F6B9E01F366B28','released',X'78016364800046280D0000280003','2026-11-27T13:07:30.431+00:00','2026-11-27T13:07:30.439+00:00','2026-11-27T13:07:30.447+00:00');
INSERT INTO "attempts" VALUES(2,1,0,X'383E8F5A246D88124A17F781E7FF41DE','abandoned',X'7801636680000000200004','2026-11-27T13:07:30.490+00:00','2026-11-27T13:07:30.495+00:00','2026-11-27T13:07:34.387+00:00');
INSERT INTO "attempts" VALUES(3,1,1,X'9D6F23948C26297BAE466836D7ACE166','released',X'78016366800046280D0000480005','2026-11-27T13:07:34.411+00:00','2026-11-27T13:07:34.431+00:00','2026-11-27T13:07:34.441+00:00');
INSERT INTO "attempts" VALUES(4,2,0,X'614FD77A0F5EFF439669E7B40A540BAD','aggregated',X'78016364800016280D0000400006','2026-11-27T13:07:34.495+00:00','2026-11-27T13:07:34.509+00:00',NULL);
CREATE TABLE hosts (
    user TEXT PRIMARY KEY,
    node TEXT NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO "hosts" VALUES('ada','node-1');
INSERT INTO "hosts" VALUES('ben','node-1');
CREATE TABLE latest (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    round INTEGER NOT NULL,
    model_bytes INTEGER NOT NULL,
    state_bytes INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    layout TEXT NOT NULL
) STRICT;
INSERT INTO "latest" VALUES(1,1,7,7,1325338729,'');
CREATE TABLE metrics (
    kind TEXT NOT NULL,
    release INTEGER NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (kind, release)
) STRICT, WITHOUT ROWID;
INSERT INTO "metrics" VALUES('train',1,'{"epsilon": 1.0}');
INSERT INTO "metrics" VALUES('train',2,'{"epsilon": 1.0}');
CREATE TABLE openings (
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    list_hash BLOB NOT NULL CHECK (length(list_hash) = 32),
    keepers TEXT NOT NULL,
    PRIMARY KEY (round, attempt)
) STRICT
;
CREATE TABLE run (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    format INTEGER NOT NULL,
    created TEXT NOT NULL,
    plan TEXT NOT NULL,
    configuration TEXT NOT NULL,
    configuration_hash TEXT NOT NULL,
    stream_id TEXT NOT NULL,
    key_fingerprint TEXT NOT NULL,
    simulated INTEGER NOT NULL,
    owner TEXT NOT NULL,
    sealed TEXT
) STRICT;
INSERT INTO "run" VALUES(1,3,'2026-11-27T13:07:30.399+00:00','{"clip_norm": 1.0, "delta": 1e-05, "mechanism": {"lam": 0.5, "name": "lambda-cgd"}, "noise_multiplier": 2.0, "participation": {"max_participations": 2, "min_separation": 2, "rounds": 6, "sampling": "none", "sampling_rate": null}}','{"cohort_size": 2, "identity": "declared", "inner": {"lr": 0.5}, "noise stream": "chacha20"}','1384723f0fcd157ec7156e2618dc4aafe6774fd33295cef2cde51f0e4709b741','e22bb38b9c032c2e485084ab29910ed6','f0fd754b7803a33c',0,'ba02c3f6353503fb363a910be13b849e',NULL);
CREATE TABLE skips (
    id INTEGER PRIMARY KEY,
    round INTEGER NOT NULL,
    at TEXT NOT NULL,
    reason TEXT NOT NULL
) STRICT;
INSERT INTO "skips" VALUES(1,1,'2026-11-27T13:07:30.487+00:00','few users');
CREATE TABLE users (
    id INTEGER PRIMARY KEY,
    user TEXT NOT NULL UNIQUE,
    participations INTEGER NOT NULL,
    last_round INTEGER NOT NULL
) STRICT;
INSERT INTO "users" VALUES(1,'ada',2,2);
INSERT INTO "users" VALUES(2,'ben',1,0);
INSERT INTO "users" VALUES(3,'cy',1,1);
INSERT INTO "users" VALUES(4,'dee',1,1);
INSERT INTO "users" VALUES(5,'eva',1,2);
CREATE UNIQUE INDEX released_once ON attempts (round) WHERE state = 'released';
CREATE UNIQUE INDEX one_in_flight ON attempts ((1)) WHERE state IN ('planned', 'aggregated');
CREATE UNIQUE INDEX spent_once ON attempts (round) WHERE state = 'spent';
CREATE UNIQUE INDEX one_opening ON attempts ((1)) WHERE state = 'opening';
COMMIT;
