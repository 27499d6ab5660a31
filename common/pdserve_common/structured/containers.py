"""Arrays and objects of a JSON schema."""

from collections.abc import Collection

from pdserve_common.structured import pattern_text, patterns
from pdserve_common.structured.node import Node, Written, if_set, kind, short
from pdserve_common.structured.scalars import read_pattern

MAX_NAME_CHARS = 64
# An object with minProperties or maxProperties has at most so many: xgrammar makes a rule for each
# pair of them.
MAX_COUNTED_PROPERTIES = 64


def read_array(node: Node) -> Written:
    low, high = node.lengths("Items")
    if node.schema.get("uniqueItems", False) is not False and (high is None or high > 1):
        node.refuse("uniqueItems", "is not enforced")
    prefix = _prefix(node)
    items = _items(node, has_prefix=bool(prefix))
    if high is not None and high <= len(prefix):
        prefix, items = prefix[:high], None
    if items is None:
        high = None
        if low > len(prefix):
            node.refuse("minItems", f"is {low}, there are at most {len(prefix)} items")
    if not prefix and items == {} and low == 0 and high is None:
        # In XML xgrammar takes an array without items for an empty one.
        return {"type": "array", "items": {}}
    written: Written = {"type": "array", "items": False if items is None else items}
    return (
        written
        | ({"prefixItems": prefix} if prefix else {})
        | if_set(minItems=low or None, maxItems=high)
    )


def _prefix(node: Node) -> list[Written]:
    prefix = node.schema.get("prefixItems", [])
    if not isinstance(prefix, list):
        node.refuse("prefixItems", f"is {kind(prefix)}, must be an array of schemas")
    return [node.read(item, "prefixItems", n) for n, item in enumerate(prefix)]


def _items(node: Node, *, has_prefix: bool) -> Written | None:
    """The schema of items behind the prefix; None: there are none."""
    if "items" not in node.schema:
        return None if has_prefix else {}
    items = node.schema["items"]
    return None if items is False else node.read(items, "items")


def read_object(node: Node) -> Written:
    properties = _properties(node)
    required = _required(node, properties)
    names, others = _others(node, properties)
    low, high = _numbers(node, len(properties), len(required), has_others=others is not None)
    written = node.marked({"type": "object"}, properties)
    if properties:
        written |= {"properties": properties} | ({"required": required} if required else {})
    elif others == {} and names is None and low is high is None:
        return written
    return (
        written
        | _other_keywords(names, others, has_properties=bool(properties))
        | if_set(minProperties=low, maxProperties=high)
    )


def _properties(node: Node) -> dict[str, Written]:
    properties = node.schema.get("properties", {})
    if not isinstance(properties, dict):
        node.refuse("properties", f"is {kind(properties)}, must be an object of schemas")
    node.spend("properties", len(properties), "properties")
    for name in properties:
        if len(name) > MAX_NAME_CHARS:
            node.refuse(
                "properties",
                f"has {short(name)} of {len(name)} characters, at most {MAX_NAME_CHARS}",
            )
    return {name: node.read(schema, "properties", name) for name, schema in properties.items()}


def _required(node: Node, properties: Collection[str]) -> list[str]:
    required = node.schema.get("required", [])
    if not isinstance(required, list):
        node.refuse("required", f"is {kind(required)}, must be an array of names")
    for name in required:
        if not isinstance(name, str) or name not in properties:
            node.refuse("required", f"has {short(name)}, which properties has not")
    return [name for name in properties if name in required]


def _numbers(
    node: Node, num_properties: int, num_required: int, *, has_others: bool
) -> tuple[int | None, int | None]:
    """minProperties and maxProperties, as far as they say anything new."""
    low, high = node.lengths("Properties")
    if high is not None and high < num_required:
        node.refuse("maxProperties", f"is {high}, {num_required} are required")
    if not has_others and low > num_properties:
        node.refuse("minProperties", f"is {low}, there are at most {num_properties}")
    # Names may repeat where they are not listed, and count once.
    if has_others and low > max(num_required, 0 if num_properties else 1):
        node.refuse("minProperties", f"is {low}, which is not enforced where any names may follow")
    least = low if low > num_required else None
    most = high if high is not None and (has_others or high < num_properties) else None
    if num_properties > MAX_COUNTED_PROPERTIES and (least, most) != (None, None):
        node.refuse(
            "minProperties" if most is None else "maxProperties",
            f"is set beside {num_properties} properties, at most {MAX_COUNTED_PROPERTIES}",
        )
    return least, most


def _others(node: Node, properties: dict[str, Written]) -> tuple[str | None, Written | None]:
    """The pattern of other names (None: any), and the schema of their values (None: no others)."""
    additional = node.schema.get("additionalProperties", "properties" not in node.schema)
    if node.schema.get("patternProperties", {}) != {}:
        return _pattern_properties(node, properties)
    names = _names(node, properties) if "propertyNames" in node.schema else None
    if additional is False:
        return None, None
    others = node.read(additional, "additionalProperties")
    if names is not None or not properties:
        return names, others
    words = [name for name in properties if _is_plain(name)]
    tree = node.names("additionalProperties", patterns.all_but(words))
    return f"^{pattern_text.write(tree)}$", others


def _is_plain(name: str) -> bool:
    """No character of it is escaped, so that another spelling cannot be meant."""
    return patterns.restrict(patterns.literal(name), patterns.JSON_CHARS) is not None


def _pattern_properties(
    node: Node, properties: dict[str, Written]
) -> tuple[str | None, Written | None]:
    keyword = "patternProperties"
    value = node.schema[keyword]
    if not isinstance(value, dict) or len(value) != 1:
        node.refuse(keyword, "is enforced with one pattern only")
    _check_no_properties(node, keyword, properties)
    for other in ("additionalProperties", "propertyNames"):
        if node.schema.get(other, False) is not False:
            node.refuse(other, f"is not enforced beside {keyword}")
    ((text, schema),) = value.items()
    tree = node.names(keyword, read_pattern(node, keyword, text))
    return f"^{pattern_text.write(tree)}$", node.read(schema, keyword, text)


def _check_no_properties(node: Node, keyword: str, properties: Collection[str]) -> None:
    if properties:
        node.refuse(keyword, "is not enforced beside properties")


def _names(node: Node, properties: Collection[str]) -> str | None:
    """The pattern of propertyNames; None: any name."""
    _check_no_properties(node, "propertyNames", properties)
    schema = node.follow(node.schema["propertyNames"], "propertyNames")
    if isinstance(schema, dict) and not {"type", "enum", "const"} & schema.keys():
        schema = {"type": "string"} | schema
    written = node.read(schema, "propertyNames")
    if written == {"type": "string"}:
        return None
    if "pattern" in written and node.document.name_chars != patterns.JSON_CHARS:
        node.refuse("propertyNames", "is enforced in XML with names only")
    if "pattern" in written:
        return str(written["pattern"])
    names = written.get("enum")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        node.refuse("propertyNames", "is enforced with pattern, format, lengths or names only")
    tree = patterns.Alt(tuple(patterns.literal(name) for name in names))
    return f"^{pattern_text.write(node.names('propertyNames', tree))}$"


def _other_keywords(names: str | None, others: Written | None, *, has_properties: bool) -> Written:
    if others is None:
        return {"additionalProperties": False}
    if names is None:
        return {"additionalProperties": others}
    if has_properties:
        return {
            "propertyNames": {"type": "string", "pattern": names},
            "additionalProperties": others,
        }
    # xgrammar takes any value with propertyNames alone.
    return {"patternProperties": {names: others}, "additionalProperties": False}
