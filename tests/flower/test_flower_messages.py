"""What is asked of a node, and what it replies."""

from dataclasses import replace

import numpy as np
from flower_requests import LAYOUT, TASK, request
from flwr.app import ConfigRecord, Message, RecordDict

from fedcgd_flower.messages import model_records, read_train_message, train_message
from fedcgd_flower.users import HostedUsers, read_users_reply, users_query, users_reply


def test_request_carries_one_flat_array_and_the_task() -> None:
    message = request()
    assert [list(arrays) for arrays in message.content.array_records.values()] == [["flat"]]
    model, config, task = read_train_message(message)
    np.testing.assert_array_equal(model, np.zeros(5, np.float32))
    assert config["server-round"] == 4
    assert task == TASK


def test_the_requests_of_all_nodes_share_one_copy_of_the_model() -> None:
    records = model_records(np.arange(5, dtype=np.float32), LAYOUT)
    messages = [train_message(records, ConfigRecord(), replace(TASK, node=node)) for node in (1, 2)]
    first, second = (message.content["model"]["flat"].data for message in messages)
    assert first is second
    model, _, _ = read_train_message(messages[1])
    np.testing.assert_array_equal(model, np.arange(5))


def test_users_are_read_once_each_and_only_as_text() -> None:
    query = users_query(1)
    assert read_users_reply(users_reply(query, lambda: ["b", "a", "b"])) == HostedUsers(("b", "a"))
    assert read_users_reply(users_reply(query, lambda: ["b", "a", "b"], shared=True)) == HostedUsers(
        ("a", "b"), shared=True
    )
    assert read_users_reply(users_reply(query, list)) == HostedUsers(())
    assert read_users_reply(None) is None
    assert read_users_reply(Message(RecordDict({"fedcgd": ConfigRecord({"users": [1, 2]})}), reply_to=query)) is None
    assert read_users_reply(Message(RecordDict({"fedcgd": ConfigRecord({"users": [""]})}), reply_to=query)) is None
    assert read_users_reply(Message(RecordDict({"fedcgd": ConfigRecord({"users": "ab"})}), reply_to=query)) is None
    assert read_users_reply(Message(RecordDict(), reply_to=query)) is None
