"""All who may use Docker on a host see a job's environment: people are told before a secret gets there."""

import pytest

from gpurun.jobs.spec import visible_secrets

SECRET = ["HF_TOKEN", "TOKEN", "GITHUBTOKEN", "WANDB_API_KEY", "KEY", "aws_secret_access_key", "DB_PASSWORD",
          "PASSWORD_OF_DB", "MYSQL_PASSWD", "MY_SECRET_THING", "GIT_PAT", "GOOGLE_CREDENTIALS"]  # fmt: skip
PLAIN = ["LR", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "KEYS", "MONKEY", "KEYBOARD", "PATH", "PATTERN", "TOKEN_FILE",
         "DB_PASSWORD_FILE", "SECRETS_DIR", "NCCL_DEBUG"]  # fmt: skip


@pytest.mark.parametrize("name", SECRET)
def test_a_name_like_a_secret_is_told(name):
    assert visible_secrets({name: "x", "LR": "0.1"}) == (name,)


@pytest.mark.parametrize("name", PLAIN)
def test_other_names_are_not(name):
    assert visible_secrets({name: "x"}) == ()


def test_an_empty_value_is_no_secret():
    assert visible_secrets({"HF_TOKEN": ""}) == ()
    assert visible_secrets({}) == ()
