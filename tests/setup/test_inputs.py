from stretto.environments.data import Row
from stretto.environments.tasks import Task
from stretto.setup.inputs import reward_columns


def test_a_column_of_a_task_comes_with_the_first_row_that_lacks_it():
    train = [
        Row(text="a", columns={"answer": 1}, where="rows.jsonl:1"),
        Row(text="b", columns={"answer": 2, "level": 3}, where="rows.jsonl:2"),
    ]
    held_out = [Row(text="c", columns={"answer": 4, "source": "x"}, where="held.jsonl:1")]
    task = Task(name="rows.jsonl", train=train, evaluation=held_out, reward="rewards:one")
    assert reward_columns(task) == {"answer": None, "level": "rows.jsonl:1", "source": "rows.jsonl:1"}
