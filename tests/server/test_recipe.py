"""The recipe of CONTRIBUTING.md: an endpoint is one file and one line of the table of routes."""

from serving import key_file

from jaxrag.server.fields import Fields
from jaxrag.server.http.app import plain


class CountFields(Fields):
    """What its body holds."""

    text: str


def count_tokens(call):
    """POST /v1/count: how many tokens a text has. The file of the endpoint would hold this."""
    text = call.read(CountFields).text
    return {"count": len(call.state.model.text_tokenizer().encode(text))}


def test_a_new_endpoint_answers_beside_the_others(running, served_model):
    with running(served_model, {}) as server:
        routes = server.app.router.routes
        routes.append(plain("/v1/count", count_tokens, "POST"))  # the one line
        answer = server.post("/v1/count", text="Which animal does Kora Felell keep?")
        assert answer.json() == {"count": 7}
        assert answer.headers["x-request-id"]

        wrong = server.post("/v1/count", text=3)
        assert wrong.status_code == 400
        assert "text" in wrong.json()["error"]["message"]
        assert server.client.get("/v1/count").status_code == 405


def test_a_new_endpoint_asks_for_a_key_where_the_server_does(running, served_model, tmp_path):
    with running(served_model, {}, keys=key_file(tmp_path / "keys.toml", {"one": ""})) as server:
        server.app.router.routes.append(plain("/v1/count", count_tokens, "POST"))
        assert server.post("/v1/count", text="a goat").status_code == 401
        server.client.headers["authorization"] = "Bearer one"
        assert server.post("/v1/count", text="a goat").json()["count"] == 2
