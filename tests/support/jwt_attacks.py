"""JWTs that must open nothing, each with its own reason why."""

import functools
import hmac
import json
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, utils

from tenants.auth.jwt import JWT_BYTES_MAX
from tests.support.issuers import ACCOUNT, AUDIENCE, MISSING, Sign, World, jwk, private_key, raw, signer, url64

# The order of P-256's group, and of Ed25519's.
P256_N: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
ED25519_L: Final = 2**252 + 27742317777372353535851937790883648493
LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"

ALG, KEY, SIGNED = "its 'alg' is not", "its 'kid' is none", "its signature is not"
UNSIGNED, UNNAMED, KIND = "has no signature", "names no key", "another kind of token"
FORM, BASE64 = "not three parts", "not as an encoder writes"
JSON, TWICE, DEEP, WRONG = "its JSON is wrong", "a key twice", "nested too deeply", "its claims are wrong"
ISS, AUD, LONG, EXPIRED = "its 'iss' is no issuer", "its 'aud' is not this server", "the most is 3600", "it has expired"
NO_ACCOUNT, NO_PERMISSION, NO_LIST = "names no account", "gives no permission", "no list of words"


class Attack(NamedTuple):
    """`make` gives the text, `reason` is part of why it is refused."""

    name: str
    make: Callable[[World], str]
    reason: str


def each(name: str, values: Iterable[Any], make: Callable[[World, Any], str], reason: str) -> list[Attack]:
    """One attack for each value."""
    return [Attack(f"{name} {value!r}"[:70], functools.partial(_swapped, make, value), reason) for value in values]


def _swapped(make: Callable[[World, Any], str], value: Any, world: World) -> str:
    return make(world, value)


def with_header(name: str, *values: Any, reason: str) -> list[Attack]:
    return each(f"header's {name}", values, lambda world, value: world.jwt(header={name: value}), reason)


def with_claim(name: str, *values: Any, reason: str) -> list[Attack]:
    return each(name, values, lambda world, value: world.jwt(**{name: value}), reason)


def pem(algorithm: str) -> bytes:
    form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return private_key(algorithm).public_key().public_bytes(*form)  # type: ignore[no-any-return]


def public_bytes() -> bytes:
    form = (serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return private_key("EdDSA").public_key().public_bytes(*form)  # type: ignore[no-any-return]


def fixed(signature: bytes) -> Sign:
    return lambda _: signature


def truncated(text: bytes) -> bytes:
    return signer("EdDSA")(text)[:60]


def lengthened(text: bytes) -> bytes:
    return signer("EdDSA")(text) + b"\0"


def shifted(text: bytes) -> bytes:
    """Ed25519's s + L: the same equation, another signature."""
    signature = signer("EdDSA")(text)
    return signature[:32] + (int.from_bytes(signature[32:], "little") + ED25519_L).to_bytes(32, "little")


def der(text: bytes) -> bytes:
    plain = signer("ES256")(text)
    return utils.encode_dss_signature(int.from_bytes(plain[:32], "big"), int.from_bytes(plain[32:], "big"))


def pss(text: bytes) -> bytes:
    scheme = padding.PSS(padding.MGF1(hashes.SHA256()), 32)
    return private_key("RS256").sign(text, scheme, hashes.SHA256())  # type: ignore[no-any-return]


def rsa_pem_as_secret(text: bytes) -> bytes:
    return hmac.digest(pem("RS256"), text, "sha256")


def flipped(text: str) -> str:
    """With a bit of its signature changed."""
    head, signature = text.rsplit(".", 1)
    return f"{head}.{LETTERS[LETTERS.index(signature[0]) ^ 1]}{signature[1:]}"


def loosened(text: str) -> str:
    """The last letter of an Ed25519 signature has four bits that mean nothing."""
    return text[:-1] + LETTERS[LETTERS.index(text[-1]) + 1]


def spliced(world: World) -> str:
    """The claims of one, the signature of another."""
    return ".".join([*world.jwt(sub="root").split(".")[:2], world.jwt().split(".")[2]])


def repeated(world: World, name: str, value: Any) -> str:
    return world.jwt(raw_claims=f"{json.dumps(world.claims())[:-1]}, {json.dumps({name: value})[1:]}".encode())


def written(world: World, name: str, value: str) -> str:
    """A claim in JSON as it is given, right or not."""
    return world.jwt(raw_claims=json.dumps(world.claims(**{name: "HERE"})).replace('"HERE"', value).encode())


def mapped(world: World, **claims: Any) -> str:
    return world.jwt(**{"iss": "https://mapped.example", **claims})


def as_json(world: World) -> str:
    return json.dumps(dict(zip(("protected", "payload", "signature"), world.jwt().split("."), strict=True)))


def encrypted(_: World) -> str:
    return ".".join(url64(part) for part in (b'{"alg": "dir", "enc": "A128GCM"}', b"k", b"iv", b"text", b"tag"))


def one_kid(kid: str, kind: str) -> Attack:
    """Signed rightly by a key that is published, but not for this."""
    algorithm = kind.split()[0] if kid != "of-another-algorithm" else "EdDSA"
    return Attack(f"a key {kid}", lambda world: world.jwt(algorithm, {"kid": kid}, signer(kind)), KEY)


ALGORITHM_ATTACKS = [
    Attack("alg none, unsigned", lambda w: w.jwt(header={"alg": "none"}, sign=fixed(b"")), UNSIGNED),
    *with_header("alg", "none", "None", "NONE", "nOnE", "none ", MISSING, None, "", 1, ["EdDSA"], reason=ALG),
    *with_header("alg", "eddsa", "EDDSA", "EdDSA ", "EdDSA\0", "Ed25519", "ES256", "RS256", reason=ALG),
    Attack("HS256 with the public key's PEM", lambda w: w.hmac(pem("EdDSA")), ALG),
    Attack("HS256 with the public key's bytes", lambda w: w.hmac(public_bytes()), ALG),
    Attack("HS256 with the JWK", lambda w: w.hmac(json.dumps(jwk("EdDSA", "EdDSA-1")).encode()), ALG),
    Attack("HS256 with an empty secret", lambda w: w.hmac(b""), ALG),
    Attack("HS256 with the published secret", lambda w: w.hmac(b"k" * 32, kid="symmetric"), ALG),
    Attack("HS512", lambda w: w.hmac(pem("EdDSA"), "sha512", alg="HS512"), ALG),
    Attack("HMAC that says EdDSA", lambda w: w.hmac(public_bytes(), alg="EdDSA"), SIGNED),
    Attack("HS256 with the RSA key's PEM", lambda w: w.jwt("RS256", {"alg": "HS256"}, rsa_pem_as_secret), ALG),
    Attack("HMAC that says RS256", lambda w: w.jwt("RS256", sign=rsa_pem_as_secret), SIGNED),
    Attack("PS256 with the RSA key", lambda w: w.jwt("RS256", {"alg": "PS256"}, pss), ALG),
    Attack("PSS that says RS256", lambda w: w.jwt("RS256", sign=pss), SIGNED),
    Attack("RS384", lambda w: w.jwt("RS256", {"alg": "RS384"}, signer("RS256", hashes.SHA384)), ALG),
    Attack("SHA-384 that says RS256", lambda w: w.jwt("RS256", sign=signer("RS256", hashes.SHA384)), SIGNED),
    Attack("ES384", lambda w: w.jwt("ES256", {"alg": "ES384", "kid": "P-384"}, signer("ES256 P-384")), ALG),
]

KEY_ATTACKS = [
    Attack("a key of one's own", lambda w: w.jwt(sign=signer("EdDSA own")), SIGNED),
    Attack("an ES256 key of one's own", lambda w: w.jwt("ES256", sign=signer("ES256 own")), SIGNED),
    Attack("an RSA key of one's own", lambda w: w.jwt("RS256", sign=signer("RS256 own")), SIGNED),
    Attack("another issuer's key", lambda w: w.jwt("ES256", iss="https://eddsa.example"), ALG),
    Attack("another issuer's kid", lambda w: w.jwt(header={"kid": "ES256-1"}), KEY),
    *with_header("kid", MISSING, None, 1, ["EdDSA-1"], {"kid": "EdDSA-1"}, reason=UNNAMED),
    *with_header("kid", "", "../../../../dev/null", "/proc/self/environ", "x' UNION SELECT 'key' --", reason=KEY),
    *with_header("kid", "' OR '1'='1", "EdDSA-1\x00", "EdDSA-1 ", "eddsa-1", "https://attacker.example/k", reason=KEY),
    *with_header("kid", "__class__", "*", "$(id)", "ЕdDSA-1", "k" * 4000, reason=KEY),
    one_kid("for-encryption", "EdDSA encryption"),
    one_kid("for-signing", "EdDSA signing"),
    one_kid("published", "EdDSA published"),
    one_kid("of-another-algorithm", "ES256"),
    one_kid("withdrawn", "EdDSA withdrawn"),
    one_kid("weak", "RS256 weak"),
    one_kid("P-384", "ES256 P-384"),
]

HEADER_ATTACKS = [
    Attack(
        "jwk of one's own", lambda w: w.jwt(header={"jwk": jwk("EdDSA own", "x")}, sign=signer("EdDSA own")), "'jwk'"
    ),
    *with_header("jwk", None, {}, reason="header has 'jwk'"),
    *with_header("jku", "https://attacker.example/jwks", "", reason="header has 'jku'"),
    *with_header("x5u", "https://attacker.example/x5", reason="header has 'x5u'"),
    *with_header("x5c", ["MIIB"], reason="header has 'x5c'"),
    *with_header("crit", ["exp"], ["b64"], [], None, reason="header has 'crit'"),
    *with_header("b64", False, True, reason="header has 'b64'"),
    *with_header("cty", "JWT", reason="header has 'cty'"),
    *with_header("zip", "DEF", reason="header has 'zip'"),
    *with_header("enc", "A128GCM", reason="header has 'enc'"),
    *with_header("typ", "logout+jwt", "secevent+jwt", "dpop+jwt", "JWT ", "", None, 1, reason=KIND),
    Attack("header is a list", lambda w: w.jwt(header=[w.header()]), JSON),
    Attack("header is no JSON", lambda w: w.jwt(header=b"EdDSA"), JSON),
    Attack("header has NaN", lambda w: w.jwt(header=b'{"alg": "EdDSA", "kid": "EdDSA-1", "x": NaN}'), JSON),
    Attack("alg twice", lambda w: w.jwt(header=b'{"alg": "none", "alg": "EdDSA", "kid": "EdDSA-1"}'), TWICE),
    Attack("kid twice", lambda w: w.jwt(header=b'{"alg": "EdDSA", "kid": "x", "kid": "EdDSA-1"}'), TWICE),
    Attack("byte order mark", lambda w: w.jwt(header=b"\xef\xbb\xbf" + json.dumps(w.header()).encode()), JSON),
    Attack("header in UTF-16", lambda w: w.jwt(header=json.dumps(w.header()).encode("utf-16")), JSON),
    Attack("header nested deeply", lambda w: w.jwt(header=b'{"x":' + b"[" * 2500 + b"]" * 2500 + b"}"), DEEP),
]

SIGNATURE_ATTACKS = [
    Attack("signature stripped", lambda w: w.jwt().rsplit(".", 1)[0] + ".", UNSIGNED),
    Attack("signature truncated", lambda w: w.jwt(sign=truncated), SIGNED),
    Attack("signature lengthened", lambda w: w.jwt(sign=lengthened), SIGNED),
    *each("a bit flipped", ("EdDSA", "ES256", "RS256"), lambda w, algorithm: flipped(w.jwt(algorithm)), SIGNED),
    *each("zeros", ("EdDSA", "ES256"), lambda w, algorithm: w.jwt(algorithm, sign=fixed(bytes(64))), SIGNED),
    Attack("s plus the order, Ed25519", lambda w: w.jwt(sign=shifted), SIGNED),
    Attack("the same signature as DER", lambda w: w.jwt("ES256", sign=der), SIGNED),
    Attack("s zero", lambda w: w.jwt("ES256", sign=fixed(raw(1, 0))), SIGNED),
    Attack("r zero", lambda w: w.jwt("ES256", sign=fixed(raw(0, 1))), SIGNED),
    Attack("r and s the order", lambda w: w.jwt("ES256", sign=fixed(raw(P256_N, P256_N))), SIGNED),
    Attack("zeros, RSA", lambda w: w.jwt("RS256", sign=fixed(bytes(256))), SIGNED),
    Attack("one, RSA", lambda w: w.jwt("RS256", sign=fixed(bytes(255) + b"\1")), SIGNED),
    Attack("claims changed, signature kept", spliced, SIGNED),
]

FORM_ATTACKS = [
    Attack("signature and dot stripped", lambda w: w.jwt().rsplit(".", 1)[0], FORM),
    Attack("four parts", lambda w: w.jwt() + "." + url64(b"more"), FORM),
    Attack("five parts of a JWE", encrypted, FORM),
    Attack("one part", lambda w: w.jwt().replace(".", ""), FORM),
    Attack("JSON serialization", as_json, FORM),
    *each("text", ("", ".", "..", "a.b", "....", "Bearer"), lambda w, text: text, FORM),
    *each("behind it", ("=", "==", "\n", " ", "\0", "%00", "é"), lambda w, more: w.jwt() + more, FORM),
    *each("before it", (" ", "\n", "Bearer ", "\ufeff"), lambda w, more: more + w.jwt(), FORM),
    *each("within it", ("\n", " ", "="), lambda w, more: w.jwt().replace(".", f"{more}.", 1), FORM),
    Attack("the other alphabet", lambda w: w.jwt(sign=fixed(b"\xff\xfe" * 32)).replace("_", "/"), FORM),
    Attack("full-width letters", lambda w: w.jwt().replace("e", "ｅ", 1), FORM),
    Attack("bits behind the end", lambda w: loosened(w.jwt()), BASE64),
    Attack("a letter too many", lambda w: w.jwt(sign=fixed(bytes(63))) + "A", "base64"),
    Attack("oversized", lambda w: w.jwt(more="x" * JWT_BYTES_MAX), "the most is 8192"),
]

JSON_ATTACKS = [
    Attack("a JWT in a JWT", lambda w: w.jwt(raw_claims=w.jwt().encode()), JSON),
    Attack("claims are a list", lambda w: w.jwt(raw_claims=[w.claims()]), JSON),
    Attack("claims are no UTF-8", lambda w: w.jwt(raw_claims=b'{"sub": "\xff"}'), JSON),
    Attack("claims nested deeply", lambda w: written(w, "more", "[" * 2500 + "]" * 2500), DEEP),
    Attack("a lone surrogate", lambda w: written(w, "sub", '"\\ud800"'), JSON),
    Attack("two documents", lambda w: w.jwt(raw_claims=json.dumps(w.claims()).encode() + b"{}"), JSON),
    Attack("iss twice", lambda w: repeated(w, "iss", "https://es256.example"), TWICE),
    Attack("exp twice", lambda w: repeated(w, "exp", w.now + 1200), TWICE),
    Attack("account twice", lambda w: repeated(w, "hearth_account", "f" * 32), TWICE),
    Attack("twice by an escape", lambda w: written(w, "more", '1, "hearth\\u005faccount": "x"'), TWICE),
    Attack("twice further down", lambda w: written(w, "more", '{"a": 1, "a": 2}'), TWICE),
    *each(
        "exp written", ("NaN", "Infinity", "-Infinity", "1e999", "0x1", "01"), lambda w, t: written(w, "exp", t), JSON
    ),
    *each("digits of exp", (20, 400, 2000), lambda w, digits: written(w, "exp", "9" * digits), WRONG),
    Attack("digits of exp 5000", lambda w: written(w, "exp", "9" * 5000), JSON),
]

CLAIM_ATTACKS = [
    *with_claim("iss", MISSING, None, 1, {}, ["https://eddsa.example"], "", "https://eddsa.example/", reason=ISS),
    *with_claim("iss", "https://EDDSA.example", "http://eddsa.example", "https://eddsa.example ", reason=ISS),
    *with_claim("iss", "https://еddsa.example", "https://eddsa.example.attacker.example", reason=ISS),
    *each("missing", ("aud", "sub", "jti", "iat", "exp"), lambda w, name: w.jwt(**{name: MISSING}), "missing required"),
    *with_claim("aud", None, 1, {}, [[AUDIENCE]], [AUDIENCE, 1], [AUDIENCE] * 101, {AUDIENCE: 1}, reason=WRONG),
    *with_claim("aud", "https://other.example", f"{AUDIENCE}/", AUDIENCE[:-1], AUDIENCE.upper(), "*", reason=AUD),
    *with_claim("aud", ["https://other.example"], [], [f"{AUDIENCE} https://other.example"], reason=AUD),
    *with_claim("sub", "", 1, None, ["ann"], "s" * 256, reason=WRONG),
    *with_claim("jti", "", 7, None, ["1"], reason=WRONG),
    *with_claim("exp", None, "9999999999", True, [9999999999], -1, 2**60, 1e300, reason=WRONG),
    *with_claim("iat", None, "0", False, -5, 2**60, reason=WRONG),
    *with_claim("nbf", None, "0", True, 2**60, reason=WRONG),
    Attack("exp in the past", lambda w: w.jwt(exp=w.now - 1), EXPIRED),
    Attack("exp a moment ago", lambda w: w.jwt(exp=w.now - 0.001), EXPIRED),
    Attack("exp now", lambda w: w.jwt(exp=w.now), EXPIRED),
    Attack("iat in the future", lambda w: w.jwt(iat=w.now + 60), "'iat' lies in the future"),
    Attack("nbf in the future", lambda w: w.jwt(nbf=w.now + 60), "'nbf' lies in the future"),
    Attack("lives too long", lambda w: w.jwt(exp=w.now + 3600), LONG),
    Attack("lives for ever", lambda w: w.jwt(exp=2**40), LONG),
    Attack("issued at the beginning", lambda w: w.jwt(iat=0), LONG),
]

GRANT_ATTACKS = [
    *with_claim("hearth_account", MISSING, None, [ACCOUNT], {"id": ACCOUNT}, 123456789, "", "*", reason=NO_ACCOUNT),
    *with_claim("hearth_account", ACCOUNT.upper(), f"{ACCOUNT}\n", f" {ACCOUNT}", ACCOUNT[:-1], reason=NO_ACCOUNT),
    *with_claim("hearth_account", f"{ACCOUNT}0", f"../{ACCOUNT}", "٠" * 32, f"{ACCOUNT},{'f' * 32}", reason=NO_ACCOUNT),
    Attack("mapped: the account itself", lambda w: mapped(w, team=ACCOUNT, scope="inference"), NO_ACCOUNT),
    Attack("mapped: another claim", lambda w: mapped(w, hearth_account="red", scope="inference"), NO_ACCOUNT),
    *each("mapped:", ("RED", "red ", "", ["red"], None), lambda w, team: mapped(w, team=team), NO_ACCOUNT),
    Attack("no permission, no default", lambda w: mapped(w, team="red"), NO_PERMISSION),
    Attack("more than the issuer may give", lambda w: mapped(w, team="red", scope="account:admin"), NO_PERMISSION),
    *with_claim("hearth_permissions", "operator", ["operator"], "OPERATOR", "Inference", "*", reason=NO_PERMISSION),
    *with_claim("hearth_permissions", "inference,usage:read", "inference\u00a0operator", reason=NO_PERMISSION),
    *with_claim("hearth_permissions", "inference\toperator", "inferenc\u0435", "inference\u200b", reason=NO_PERMISSION),
    *with_claim("hearth_permissions", ["inference operator"], "admin root", "", " ", [], reason=NO_PERMISSION),
    *with_claim("hearth_permissions", None, 1, True, {"inference": True}, [1], [["inference"]], reason=NO_LIST),
    *with_claim("hearth_permissions", ["inference", None], reason=NO_LIST),
    *with_claim("hearth_models", None, 1, {"*": 1}, [["*"]], reason=NO_LIST),
    *with_claim("hearth_models", ["a\x00"], [""], ["a", "a"], ["m" * 201], reason="its 'hearth_models'"),
    *with_claim("hearth_models", [str(number) for number in range(101)], reason="its 'hearth_models'"),
]

ATTACKS: Final = [
    *ALGORITHM_ATTACKS,
    *KEY_ATTACKS,
    *HEADER_ATTACKS,
    *SIGNATURE_ATTACKS,
    *FORM_ATTACKS,
    *JSON_ATTACKS,
    *CLAIM_ATTACKS,
    *GRANT_ATTACKS,
]
