"""Keep the ClientApp you have: a mod for nodes that are one user each."""

from collections.abc import Callable

import numpy as np
from flwr.app import Context, Error, Message, RecordDict

from fedcgd.clipping import clip
from fedcgd_flower.layout import flatten, unflatten
from fedcgd_flower.messages import failed_reply, read_train_message, train_reply


def clipped_update_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Run an ordinary train function, and reply with its update (new model − old), clipped to the server's norm.

    Use it as `@app.train(mods=[clipped_update_mod])`. The function sees the model under "arrays" and the configuration under
    "config", as with Flower's own strategies. Nothing but the clipped update is sent, rounded to the server's grid: no
    metrics, no error text.
    """
    model, config, task = read_train_message(message)
    message.content = RecordDict({"arrays": unflatten(model, task.layout), "config": config})
    try:
        reply = call_next(message, context)
    except Exception as error:
        return failed_reply(message, error)
    if reply.has_error():
        return Message(Error(code=reply.error.code, reason="local training failed"), reply_to=message)
    trained = next(iter(reply.content.array_records.values()), None)
    if trained is None:
        raise ValueError("the train function's reply holds no ArrayRecord; reply with the trained model's arrays")
    update = flatten(trained, task.layout).astype(np.float64) - model
    if not np.isfinite(update).all():
        return Message(Error(code=0, reason="the update is not finite"), reply_to=message)
    return train_reply(message, task, task.grid.to_steps(clip(update, task.clip_norm)), len(task.users))
