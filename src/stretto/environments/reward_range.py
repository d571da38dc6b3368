"""The largest reward that can be trained on. Imports nothing: reward workers load this module."""

MAX_REWARD = 1e9
"""The largest magnitude of a reward, of one turn and of a whole trajectory.

With this limit, training cannot overflow float32 (3.4e38). An advantage is the difference of two returns, and a return
is the sum of an episode's rewards: for 1,000 turns, an advantage is at most 2e12. A critic squares it, and a batch sums
the squares: 4e33 over 1e9 tokens. With float16, the loss is also scaled by 2^16: 2.6e38, still finite.
"""


def is_trainable(reward: float) -> bool:
    """Tells if a number can be trained on as a reward. False for NaN and infinity."""
    return -MAX_REWARD <= reward <= MAX_REWARD


BEYOND = f"beyond {MAX_REWARD:g}, the largest reward that can be trained on: scale the rewards"
