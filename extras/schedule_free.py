"""
--optimizer with a schedule-free class (arxiv.org/abs/2405.15682): it trains one set of weights, and an average of them
is what you use. Validations, checkpoints and the finished LoRA have the average.
"""
import contextlib


@contextlib.contextmanager
def averaged_weights(optimizer):
    """Within `with` the parameters are the average. The trained weights wait beside the optimizer's state, so that a
    checkpoint that is written now has both."""
    try:
        for p, state in optimizer.state.items():
            state["trained"] = p.data.clone()
        optimizer.eval()
        yield
    finally:
        use_trained_weights(optimizer)


def use_trained_weights(optimizer):
    """Puts the trained weights back, from the copy: the optimizer's own way back rounds, so that a validation would
    change the training."""
    optimizer.train()
    for p, state in optimizer.state.items():
        p.data.copy_(state.pop("trained", p))
