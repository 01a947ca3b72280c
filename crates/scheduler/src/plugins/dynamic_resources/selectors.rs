//! CEL selectors over attributes and capacity of devices.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use cel::{
    Budget, Env, Field, Key, LibraryValue, Map, PER_CALL_LIMIT, Program, Text, Type, Value, Variables,
};
use k8s_openapi::api::resource::v1 as resource;
use schema::quantity::Quantity;

const DEVICE_TYPE_NAME: &str = "kubernetes.DRADevice";

/// A compiled selector.
pub struct Selector(Program);

static ENV: LazyLock<Env> = LazyLock::new(|| {
    let by_domain = |value: Type| Type::map(Type::String, Type::map(Type::String, value));
    let fields = [
        ("driver", Type::String),
        ("allowMultipleAllocations", Type::Bool),
        ("attributes", by_domain(Type::Dyn)),
        ("capacity", by_domain(Type::opaque("kubernetes.Quantity"))),
    ];
    let fields =
        fields.map(|(name, ty)| (name.to_owned(), Field { property: name.to_owned(), decl: ty.into() }));
    Env::new().variable("device", Type::object(DEVICE_TYPE_NAME, fields.into())).library("bindings")
});

/// Compiles the selectors of a class or claim.
pub fn compile(
    selectors: Option<&[resource::DeviceSelector]>,
    source: &str,
) -> Result<Vec<Selector>, String> {
    let compile = |(index, selector): (usize, &resource::DeviceSelector)| {
        let compile_error =
            |reason: String| format!("{source}: selector #{index}: CEL compile error: {reason}");
        let Some(cel) = &selector.cel else { return Err(compile_error("no expression is given".to_owned())) };
        match ENV.compile(&cel.expression) {
            Ok(program) if matches!(program.output(), Type::Bool | Type::Dyn) => Ok(Selector(program)),
            Ok(program) => Err(compile_error(format!(
                "must evaluate to bool or the unknown type, not {}",
                program.output().name()
            ))),
            Err(errors) => Err(compile_error(format!("compilation failed: {errors}"))),
        }
    };
    selectors.unwrap_or_default().iter().enumerate().map(compile).collect()
}

impl Selector {
    /// Whether the device matches. A runtime error counts as no match.
    pub fn matches(&self, driver: &str, device: &resource::Device) -> bool {
        let variables = Variables::new().with("device", device_value(driver, device));
        match self.0.run(&variables, &mut Budget::new(PER_CALL_LIMIT)) {
            Ok(value) => value.as_bool() == Some(true),
            Err(failure) => {
                tracing::debug!(device = device.name, %failure, "failed to evaluate device selector");
                false
            }
        }
    }
}

fn device_value<'a>(driver: &'a str, device: &'a resource::Device) -> Value<'a> {
    let attributes = device.attributes.iter().flatten().filter_map(|(name, attribute)| {
        let text = |text: &'a str| Value::String(Text::Borrowed(text));
        let value = match attribute {
            resource::DeviceAttribute { int: Some(value), .. } => Value::Int(*value),
            resource::DeviceAttribute { bool: Some(value), .. } => Value::Bool(*value),
            resource::DeviceAttribute { string: Some(value), .. } => text(value),
            resource::DeviceAttribute { version: Some(value), .. } => Value::semver(value)?,
            _ => return None,
        };
        Some((name.as_str(), value))
    });
    let capacity = device.capacity.iter().flatten().filter_map(|(name, capacity)| {
        let quantity = Quantity::parse(&capacity.value.0).ok()?;
        Some((name.as_str(), Value::Library(LibraryValue::Quantity(quantity))))
    });
    let key = |name: &'a str| Key::String(Text::Borrowed(name));
    let entries = BTreeMap::from([
        (key("driver"), Value::String(Text::Borrowed(driver))),
        (key("allowMultipleAllocations"), Value::Bool(device.allow_multiple_allocations == Some(true))),
        (key("attributes"), by_domain(driver, attributes)),
        (key("capacity"), by_domain(driver, capacity)),
    ]);
    Value::Map(Map::Message(DEVICE_TYPE_NAME.into(), Arc::new(entries)))
}

/// Groups by domain. Names without a domain are in the driver's domain.
fn by_domain<'a>(driver: &'a str, values: impl Iterator<Item = (&'a str, Value<'a>)>) -> Value<'a> {
    let mut domains: BTreeMap<&'a str, BTreeMap<Key<'a>, Value<'a>>> = BTreeMap::new();
    for (name, value) in values {
        let (domain, id) = name.split_once('/').unwrap_or((driver, name));
        domains.entry(domain).or_default().insert(Key::String(Text::Borrowed(id)), value);
    }
    let entries = domains.into_iter().map(|(domain, values)| {
        (Key::String(Text::Borrowed(domain)), Value::Map(Map::Shared(Arc::new(values))))
    });
    Value::Map(Map::WithDefault(Arc::new(entries.collect())))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(expression: &str, expected: bool) {
        let device = json!({
            "name": "g0",
            "attributes": {"model": {"string": "big"}, "other.io/cores": {"int": 8}, "driver": {"version": "1.2.3"}},
            "capacity": {"memory": {"value": "40Gi"}},
        });
        let device: resource::Device = serde_json::from_value(device).expect("it is a device");
        let selector: resource::DeviceSelector =
            serde_json::from_value(json!({"cel": {"expression": expression}})).expect("it is a selector");
        let selectors = compile(Some(&[selector]), "class c").expect("the expression compiles");
        assert_eq!(selectors[0].matches("gpu.io", &device), expected, "{expression}");
    }

    #[test]
    fn expressions_use_attributes_and_capacity() {
        check("device.driver == 'gpu.io' && device.attributes['gpu.io'].model == 'big'", true);
        check("device.attributes['other.io'].cores > 8", false);
        check("device.capacity['gpu.io'].memory.isGreaterThan(quantity('32Gi'))", true);
        check("device.attributes['gpu.io'].driver.isLessThan(semver('2.0.0'))", true);
        check("has(device.attributes['missing.io'].x)", false);
        check("device.attributes['missing.io'].x == 1", false);
        check("cel.bind(a, device.attributes['gpu.io'], a.model == 'big')", true);
    }

    #[test]
    fn reports_compile_errors() {
        let selector: resource::DeviceSelector =
            serde_json::from_value(json!({"cel": {"expression": "device.size"}})).expect("it is a selector");
        assert_eq!(
            compile(Some(&[selector]), "class c").err().as_deref(),
            Some(
                "class c: selector #0: CEL compile error: compilation failed: ERROR: <input>:1:7: undefined field 'size'\n | device.size\n | ......^"
            )
        );
    }
}
