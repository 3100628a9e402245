import pytest

from torchmuster.core.model.text import HIDDEN, hide_secrets, is_secret_name


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "--hf-token",
        "--token",
        "password",
        "AWS_SECRET_ACCESS_KEY",
        "db_passwd",
        "SECRET",
    ],
)
def test_names_of_secrets_are_known(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["--num-tokens", "tokenizer", "--max-token-length", "OMP_NUM_THREADS", "--key-dim", "PATH"],
)
def test_names_of_training_are_no_secrets(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "text",
    [
        'password = "hunter22"',
        "api_key: 'abcdef123'",
        "https://me:hunter22@host/x",
        "ghp_" + "a1" * 18,
        "AKIA" + "ABCDEFGH12345678",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter22\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_secrets_in_a_text_are_hidden(text):
    assert HIDDEN in hide_secrets(text)
    assert not {"hunter22", "abcdef123"} & set(hide_secrets(text).split("'"))
    assert "hunter22" not in hide_secrets(text)


@pytest.mark.parametrize(
    "text", ["pad_token = 0", "tokens = x['tokens']", "secret = secrets.token_hex()", "a: int = 3"]
)
def test_code_stays_as_it_is(text):
    assert hide_secrets(text) == text
