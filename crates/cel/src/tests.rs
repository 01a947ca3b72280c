use expect_test::{Expect, expect};
use serde_json::json;

use crate::{Budget, Decl, Env, RUNTIME_BUDGET, Type, Value, Variables};

/// Evaluates an expression with a few variables. Returns the result or the error as text.
fn evaluate(source: &str) -> String {
    let env = Env::new()
        .variable("x", Type::Dyn)
        .variable("authorizer", Type::opaque("kubernetes.authorization.Authorizer"));
    let x = json!({"a": [1, 2, 3], "name": "web", "nested": {"k": "v"}, "pi": 3.5, "none": null});
    let program = match env.compile(source) {
        Err(errors) => return errors.to_string(),
        Ok(program) => program,
    };
    let variables = Variables::new().with("x", Value::from_json(&x));
    match program.run(&variables, &mut Budget::new(RUNTIME_BUDGET)) {
        Ok(value) => format!("{value:?}"),
        Err(failure) => format!("error: {failure}"),
    }
}

#[track_caller]
fn check(source: &str, expected: Expect) {
    expected.assert_eq(&evaluate(source));
}

#[track_caller]
fn all_true(sources: &[&str]) {
    for source in sources {
        assert_eq!(evaluate(source), "true", "{source}");
    }
}

#[test]
fn eval_operators_and_literals() {
    all_true(&[
        "1 + 2 * 3 == 7",
        "7 / 2 == 3 && 7 % 2 == 1 && -7 / 2 == -3",
        "1.5 + 2.5 == 4.0",
        "2u + 3u == 5u",
        "'a' + \"b\" == 'ab'",
        "b'ab' + b'c' == b'abc'",
        "r'\\d' == '\\\\d'",
        "'''a\nb''' == 'a\\nb'",
        "'\\u00e9' == '\u{e9}' && '\\x41' == 'A' && '\\101' == 'A'",
        "0x1F == 31 && -9223372036854775808 < 0",
        "1 < 2 && 2 <= 2 && 3 > 2 && 'a' < 'b' && 1 < 1.5 && 2u > 1",
        "!false && !!true",
        "true ? true : 1 / 0 == 1",
        "false || true || 1 / 0 == 1",
        "1 / 0 == 1 || true",
        "!(false && 1 / 0 == 1)",
        "1 in [1, 2] && !(3 in [1, 2]) && 'a' in {'a': 1}",
        "[1, 2] + [3] == [1, 2, 3]",
        "{'a': 1, 'b': 2}.b == 2 && {1: 'x'}[1] == 'x'",
        "[1, 2, 3][1] == 2",
        "size('h\u{e9}llo') == 5 && 'abc'.size() == 3 && size([1]) == 1 && {'a': 1}.size() == 1",
        "type(1) == int && type('') == string && type([]) == list && type(null) == null_type",
        "dyn(1) == 1.0 && dyn(1u) == 1",
        "timestamp('2023-01-02T03:04:05Z').getFullYear() == 2023",
        "timestamp('2023-01-02T03:04:05Z').getHours('+02:00') == 5",
        "timestamp('2023-07-02T03:04:05Z').getHours('America/New_York') == 23",
        "timestamp('2023-01-02T03:04:05Z') + duration('1h') > timestamp('2023-01-02T03:04:05Z')",
        "duration('1h30m').getMinutes() == 90 && string(duration('90s')) == '90s'",
        "string(1.5) == '1.5' && int('12') == 12 && double('1.5') == 1.5 && string(true) == 'true'",
        "bytes('a') == b'a' && string(b'a') == 'a' && uint(3) == 3u",
    ]);
}

#[test]
fn eval_dynamic_json_values() {
    all_true(&[
        "x.a.size() == 3 && x.a[0] == 1 && x.pi == 3.5 && x.none == null",
        "has(x.name) && !has(x.missing) && has(x.nested.k) && 'name' in x",
        "x.nested['k'] == 'v' && x['name'] == 'web'",
        "x.?name.orValue('') == 'web' && x.?missing.orValue('no') == 'no'",
        "x.?nested.?k.hasValue() && !x.?nope.?k.hasValue()",
        "x.nested[?'zz'].orValue('d') == 'd' && x.a[?5].orValue(9) == 9",
        "x == x && x.nested == {'k': 'v'}",
    ]);
    check("x.missing", expect!["error: no such key: missing"]);
    check("x.a[7]", expect!["error: index out of bounds: 7"]);
    check("1 / (x.a[0] - 1)", expect!["error: division by zero"]);
    check("9223372036854775807 + x.a[0]", expect!["error: integer overflow"]);
    check("x.name + 1", expect!["error: no such overload"]);
}

#[test]
fn eval_macros() {
    all_true(&[
        "[1, 2, 3].all(i, i > 0) && ![1, 2].all(i, i > 1)",
        "[1, 2, 3].exists(i, i == 2) && [1, 2, 2].exists_one(i, i == 1)",
        "[1, 2, 3].map(i, i * 2) == [2, 4, 6] && [1, 2, 3].map(i, i > 1, i * 2) == [4, 6]",
        "[1, 2, 3].filter(i, i % 2 == 1) == [1, 3]",
        "{'a': 1, 'b': 2}.all(k, k in ['a', 'b'])",
        "[1, 0].exists(i, 1 / i == 1)",
        "[[1], [2, 3]].map(l, l.map(i, i + 1)) == [[2], [3, 4]]",
        "['a', 'b'].all(i, v, i < 2 && v in ['a', 'b'])",
        "{'a': 1}.exists(k, v, k == 'a' && v == 1) && [1, 2].existsOne(i, v, v == 2)",
        "['a', 'b'].transformList(i, v, string(i) + v) == ['0a', '1b']",
        "{'a': 1, 'b': 2}.transformMap(k, v, v > 1, v * 10) == {'b': 20}",
        "{'a': 'b'}.transformMapEntry(k, v, {v: k}) == {'b': 'a'}",
        "optional.of(3).optMap(v, v + 1).value() == 4",
        "optional.of(3).optFlatMap(v, optional.of(v)).value() == 3",
        "[3, 1, 2].sortBy(e, -e) == [3, 2, 1]",
        "[?optional.of(1), ?optional.none()] == [1] && {?'a': optional.none(), 'b': 1} == {'b': 1}",
        "optional.ofNonZeroValue('').or(optional.of('z')).value() == 'z'",
    ]);
    check(
        "[1].all(x.y, true)",
        expect![[r#"
        ERROR: <input>:1:10: argument must be a simple name
         | [1].all(x.y, true)
         | .........^"#]],
    );
    check(
        "has(x)",
        expect![[r#"
        ERROR: <input>:1:5: invalid argument to has() macro
         | has(x)
         | ....^"#]],
    );
}

#[test]
fn eval_library_functions() {
    all_true(&[
        "'a,b,c'.split(',') == ['a', 'b', 'c'] && 'abc'.split('', 2) == ['a', 'bc']",
        "'hello'.substring(1, 3) == 'el' && 'hello'.charAt(4) == 'o' && 'hello'.indexOf('l') == 2",
        "'hello'.lastIndexOf('l') == 3 && 'hello'.replace('l', 'L', 1) == 'heLlo'",
        "' a '.trim() == 'a' && 'aB'.lowerAscii() == 'ab' && ['a', 'b'].join('-') == 'a-b'",
        "'%s has %d of %.2f'.format(['x', 3, 1234.5]) == 'x has 3 of 1,234.50'",
        "'%e'.format([3.14]) == '3.140000\u{d7}10\u{2070}\u{2070}' && '%x %X'.format([255, 'a']) == 'ff 61'",
        "'%s'.format([[1, 2]]) == '[1, 2]' && '%d%%'.format([3]) == '3%'",
        "strings.quote('a\"b') == '\"a\\\\\"b\"'",
        "[1, 2, 3].isSorted() && [1, 2].sum() == 3 && [1, 3].max() == 3 && ['b', 'a'].min() == 'a'",
        "[1, 2, 1].indexOf(1) == 0 && [1, 2, 1].lastIndexOf(1) == 2",
        "[3, 1].sort() == [1, 3] && [1, 1].distinct() == [1] && lists.range(3) == [0, 1, 2]",
        "[[1], [2]].flatten() == [1, 2] && [1, 2, 3].slice(1, 2) == [2] && [1, 2].reverse() == [2, 1]",
        "sets.contains([1, 2], [1]) && sets.equivalent([1, 1], [1]) && sets.intersects([1], [1, 2])",
        "'abc 123'.find('[0-9]+') == '123' && 'a1b2'.findAll('[0-9]') == ['1', '2']",
        "'abc'.matches('^[a-c]+$') && !'\u{663}'.matches('^\\\\d$')",
        "url('https://a.com:80/p?q=1').getHostname() == 'a.com' && url('https://a.com:80/p').getPort() == '80'",
        "url('https://a.com/p?q=1&q=2').getQuery() == {'q': ['1', '2']} && !isURL('a b')",
        "quantity('1Gi').isGreaterThan(quantity('1G')) && quantity('500m').add(quantity('500m')).asInteger() == 1",
        "isQuantity('1.5Gi') && !isQuantity('x') && sign(quantity('-1')) == -1",
        "ip('10.0.0.1').family() == 4 && isIP('::1') && !isIP('x') && ip('::1').isLoopback()",
        "cidr('10.0.0.0/8').containsIP('10.1.2.3') && cidr('10.0.0.0/8').containsCIDR('10.1.0.0/16')",
        "cidr('10.1.2.3/8').masked() == cidr('10.0.0.0/8') && cidr('10.0.0.0/8').prefixLength() == 8",
        "string(ip('2001:DB8::1')) == '2001:db8::1' && !ip.isCanonical('2001:DB8::1')",
        "!format.dns1123Label().validate('web-1').hasValue() && format.uuid().validate('x').value().size() == 1",
        "format.named('date').value().validate('2024-01-01') == optional.none()",
        "semver('1.2.3').isLessThan(semver('1.10.0')) && semver('v1.2', true).minor() == 2 && !isSemver('1.2')",
        "semver('1.0.0-alpha').isLessThan(semver('1.0.0')) && semver('1.2.3').compareTo(semver('1.2.3')) == 0",
        "type(ip('::1')) == net.IP",
    ]);
}

#[test]
fn error_messages_match_cel_go() {
    check(
        "y.z",
        expect![[r#"
        ERROR: <input>:1:1: undeclared reference to 'y' (in container '')
         | y.z
         | ^"#]],
    );
    check(
        "1 + 'a'",
        expect![[r#"
        ERROR: <input>:1:3: found no matching overload for '_+_' applied to '(int, string)'
         | 1 + 'a'
         | ..^"#]],
    );
    check(
        "'a'.foo(1)",
        expect![[r#"
        ERROR: <input>:1:8: undeclared reference to 'foo' (in container '')
         | 'a'.foo(1)
         | .......^"#]],
    );
    check(
        "[1, 'a']",
        expect![[r#"
        ERROR: <input>:1:5: expected type 'int' but found 'string'
         | [1, 'a']
         | ....^"#]],
    );
    check(
        "1 && true",
        expect![[r#"
        ERROR: <input>:1:1: expected type 'bool' but found 'int'
         | 1 && true
         | ^"#]],
    );
    check(
        "'a'.size",
        expect![[r#"
        ERROR: <input>:1:4: type 'string' does not support field selection
         | 'a'.size
         | ...^"#]],
    );
    check(
        "",
        expect![[r#"
        ERROR: <input>:1:1: Syntax error: mismatched input '<EOF>' expecting {'[', '{', '(', '.', '-', '!', 'true', 'false', 'null', NUM_FLOAT, NUM_INT, NUM_UINT, STRING, BYTES, IDENTIFIER}
         | 
         | ^"#]],
    );
    check(
        "x.a x.b",
        expect![[r#"
        ERROR: <input>:1:5: Syntax error: mismatched input 'x' expecting <EOF>
         | x.a x.b
         | ....^"#]],
    );
    check(
        "1.all(i, true)",
        expect![[r#"
        ERROR: <input>:1:1: expression of type 'int' cannot be range of a comprehension (must be list, map, or dynamic)
         | 1.all(i, true)
         | ^"#]],
    );
    check(
        "1\n  + for",
        expect![[r#"
        ERROR: <input>:2:5: reserved identifier: for
         |   + for
         | ....^"#]],
    );
    check(
        "duration('x') == duration('1h')",
        expect![[r#"
        ERROR: <input>:1:10: invalid duration argument
         | duration('x') == duration('1h')
         | .........^"#]],
    );
    check(
        "'a'.matches('(')",
        expect![[r#"
        ERROR: <input>:1:13: invalid matches argument
         | 'a'.matches('(')
         | ............^"#]],
    );
}

#[test]
fn limits_cost_depth_and_type_size() {
    let list = "[1,2,3,4,5,6,7,8,9,10]";
    let nested = format!(
        "{list}.all(a, {list}.all(b, {list}.all(c, {list}.all(d, {list}.all(e, {list}.all(f, true))))))"
    );
    check(&nested, expect!["error: operation cancelled: actual cost limit exceeded"]);
    check(
        "lists.range(100000000000).size()",
        expect!["error: operation cancelled: actual cost limit exceeded"],
    );
    let exponential_list = format!("{list}.map(i, 'x').map(i, {list}.map(j, i + i + i + i))");
    assert_ne!(evaluate(&exponential_list), "");
    check(&"(".repeat(300), expect!["ERROR: <input>:-1:0: expression recursion limit exceeded: 250"]);
    check(&format!("1{}", " + 1".repeat(400)), expect!["ERROR: <input>:-1:0: max recursion depth exceeded"]);
    let nested_list = format!("[[1]]{}", ".map(v, [v, v])".repeat(60));
    check(
        &format!("dyn({nested_list}) == dyn({nested_list})"),
        expect!["error: operation cancelled: actual cost limit exceeded"],
    );
    check(&format!("{{'a': 1}}[dyn({nested_list})]"), expect![[r#"error: no such key: <list(dyn)>"#]]);
    check(
        &format!("'%s'.format([{nested_list}])"),
        expect!["error: operation cancelled: actual cost limit exceeded"],
    );
    let types = format!("[1]{}", ".map(v, {v: v})".repeat(60));
    assert!(evaluate(&types).contains("the type of the expression is too large"));
    let optional = format!("optional.of(1){}", ".optMap(v, v)".repeat(60));
    check(&optional, expect!["error: operation cancelled: actual cost limit exceeded"]);
}

#[test]
fn types_from_schemas() {
    let schema = json!({"type": "object", "properties": {
        "when": {"type": "string", "format": "date-time"},
        "wait": {"type": "string", "format": "duration"},
        "namespace": {"type": "string"},
        "ratio": {"type": "number"},
        "port": {"x-kubernetes-int-or-string": true},
        "tags": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "blob": {"type": "string", "format": "byte"}
    }});
    let decl = Decl::from_schema(&schema, true).expect("an object").with_type_name("self");
    let env = Env::new().variable("self", decl.clone());
    let object = json!({"when": "2024-01-02T03:04:05Z", "wait": "1h", "namespace": "x", "ratio": 2, "port": "80%",
        "tags": ["a", "b"], "labels": {"k": "v"}, "blob": "YQ==", "metadata": {"name": "n"}});
    for source in [
        "self.when.getFullYear() == 2024",
        "self.wait == duration('60m')",
        "self.__namespace__ == 'x'",
        "self.ratio / 4.0 == 0.5",
        "type(self.port) == string && self.port == '80%'",
        "self.tags == ['b', 'a'] && self.tags + ['a', 'c'] == ['a', 'b', 'c']",
        "self.labels.k == 'v' && self.labels.all(k, k == 'k')",
        "self.blob == b'a'",
        "self.metadata.name == 'n' && !has(self.metadata.generateName)",
    ] {
        let program = env.compile(source).unwrap_or_else(|errors| panic!("{source}: {errors}"));
        let variables = Variables::new().with("self", Value::from_declared(&object, &decl));
        let value = program.run(&variables, &mut Budget::new(RUNTIME_BUDGET));
        assert_eq!(value.map(|value| value.as_bool()), Ok(Some(true)), "{source}");
    }
    let wrong = env.compile("self.when == 'x'").expect_err("types differ").to_string();
    expect![[r#"
        ERROR: <input>:1:11: found no matching overload for '_==_' applied to '(timestamp, string)'
         | self.when == 'x'
         | ..........^"#]]
    .assert_eq(&wrong);
}

mod fuzz;

#[test]
fn resolves_fields_of_built_in_types() {
    let table = schema::kubernetes();
    let ty = table.type_by_kind("apps", "v1", "Deployment").expect("there are Deployments");
    let env = Env::new().variable("object", Decl::from_table(table, ty).with_type_name("Deployment"));
    let valid = "object.spec.replicas <= 5 && object.spec.template.spec.containers.all(c, has(c.image)) \
                && object.metadata.__namespace__ == 'x' && object.metadata.creationTimestamp.getFullYear() > 2000 \
                && object.kind == 'Deployment' && type(object.spec.strategy.rollingUpdate.maxSurge) == int";
    assert_eq!(env.compile(valid).map(|program| program.output().clone()), Ok(Type::Bool));
    expect![[r#"
        ERROR: <input>:1:12: undefined field 'replica'
         | object.spec.replica > '1'
         | ...........^"#]]
    .assert_eq(&env.compile("object.spec.replica > '1'").expect_err("no such field").to_string());
}

/// Checks the actual cost of an evaluation and the estimated maximum.
#[track_caller]
fn check_cost(schema: serde_json::Value, object: serde_json::Value, source: &str, actual: u64, most: u64) {
    let decl = Decl::from_schema(&schema, false).expect("the schema is an object").with_type_name("self");
    let program = Env::new().variable("self", decl.clone()).compile(source).expect("the expression is fine");
    let variables = Variables::new().with("self", Value::from_declared(&object, &decl));
    let mut budget = Budget::new(RUNTIME_BUDGET);
    program.run(&variables, &mut budget).expect("nothing goes wrong");
    let actual_cost = RUNTIME_BUDGET - budget.remaining().expect("it is within the budget");
    assert_eq!((actual_cost, program.estimate().max), (actual, most), "{source}");
}

#[test]
fn cost_matches_upstream() {
    let list = json!({"type": "object", "properties": {"l": {"type": "array", "maxItems": 10,
        "items": {"type": "string", "maxLength": 20}}}});
    let two = json!({"l": ["a", "b"]});
    let scalar = json!({"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}});
    let values = json!({"n": 3, "s": "abcdefghijkl"});
    check_cost(scalar.clone(), values.clone(), "self.n == 3", 3, 2);
    check_cost(scalar.clone(), values.clone(), "type(self.n) == int", 4, 4);
    check_cost(scalar.clone(), values.clone(), "self.s.startsWith('abc')", 4, 3);
    check_cost(scalar.clone(), values.clone(), "self.s.matches('^[a-z]*$')", 6, 629_148);
    check_cost(scalar.clone(), values.clone(), "self.n in [1, 2, 3]", 2, 15);
    check_cost(scalar.clone(), values.clone(), "has(self.n) ? self.n > 1 : true", 4, 4);
    check_cost(scalar, values, "duration('1h') + duration('1m') == duration('61m')", 2, 5);
    check_cost(list.clone(), two.clone(), "self.l.all(e, e == 'a' || e == 'b')", 15, 73);
    check_cost(list.clone(), two.clone(), "self.l.map(e, e + 'x').size() == 2", 33, 235);
    check_cost(list, two, "self.l.exists_one(e, e == 'a')", 10, 44);
}
