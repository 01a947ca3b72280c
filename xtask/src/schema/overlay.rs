//! The overlay: facts about types that neither crate provides, maintained by hand.

use anyhow::{Context, Result, bail};

use super::model::{Definition, Definitions, Field};

/// Applies the overlay to the definitions. A name that does not exist is an error, so that the overlay
/// stays up to date.
pub fn apply(text: &str, definitions: &mut Definitions) -> Result<()> {
    let mut package = String::new();
    let mut current_type = String::new();
    for (line, number) in text.lines().zip(1..) {
        let result = match line.split_once(' ') {
            _ if line.is_empty() || line.starts_with('#') => Ok(()),
            Some(("package", name)) => {
                name.clone_into(&mut package);
                Ok(())
            }
            Some(("type", rest)) => {
                let definition = new_type(&package, rest);
                current_type.clone_from(&definition.name);
                definitions.insert(definition.name.clone(), definition);
                Ok(())
            }
            Some(("", field)) => new_field(&package, &current_type, field, definitions),
            Some((subject, overrides)) => {
                apply_override(&format!("{package}.{subject}"), overrides, definitions)
            }
            None => Err(anyhow::anyhow!("no facts given for {line}")),
        };
        result.with_context(|| format!("overlay line {number}"))?;
    }
    for field in definitions.values_mut().flat_map(|definition| &mut definition.fields) {
        field.pointer |= field.is_struct() && !field.always && !field.value;
    }
    Ok(())
}

fn new_type(package: &str, line: &str) -> Definition {
    let mut words = line.split(' ');
    let mut definition = Definition {
        name: format!("{package}.{}", words.next().unwrap_or_default()),
        ..Definition::default()
    };
    for word in words {
        type_word(&mut definition, word);
    }
    definition
}

fn type_word(definition: &mut Definition, word: &str) {
    match word.split_once('=') {
        Some(("kind", kind)) => definition.kinds.push(kind.to_owned()),
        Some(("union", union)) => definition.union = Some(union.to_owned()),
        _ => definition.atomic |= word == "atomic",
    }
}

fn new_field(package: &str, current_type: &str, line: &str, definitions: &mut Definitions) -> Result<()> {
    let mut words = line.split(' ');
    let (Some(name), Some(tag), Some(shape)) = (words.next(), words.next(), words.next()) else {
        bail!("a field needs a name, a tag and a shape");
    };
    let (prefix, base) = shape.split_at(shape.rfind(['}', ']']).map_or(0, |end| end + 1));
    let local = base.starts_with(|c: char| c.is_ascii_uppercase());
    let shape = if local { format!("{prefix}{package}.{base}") } else { shape.to_owned() };
    let mut field = Field { name: name.to_owned(), shape, ..Field::default() };
    field_words(&mut field, std::iter::once(tag).chain(words))?;
    definitions.get_mut(current_type).context("a field outside of a type")?.fields.push(field);
    Ok(())
}

/// Parses `Type pointer a b`, `Type always a b`, `Type is kind=...` or `Type.field words...`.
fn apply_override(subject: &str, overrides: &str, definitions: &mut Definitions) -> Result<()> {
    let mut words = overrides.split(' ');
    if let Some(definition) = definitions.get_mut(subject) {
        let verb = words.next().unwrap_or_default();
        for word in words {
            if verb == "is" {
                type_word(definition, word);
                continue;
            }
            let field = definition.fields.iter_mut().find(|field| field.name == word);
            let field = field.with_context(|| format!("{subject} has no field {word}"))?;
            match verb {
                "pointer" => field.pointer = true,
                "always" => field.always = true,
                "value" => field.value = true,
                _ if verb.starts_with("go=") => verb[3..].clone_into(&mut field.go),
                _ => bail!("unknown fact {verb}"),
            }
        }
        return Ok(());
    }
    let (name, field) = subject.rsplit_once('.').context("no subject")?;
    let definition = definitions.get_mut(name).with_context(|| format!("no type {name}"))?;
    let field = definition.fields.iter_mut().find(|f| f.name == field).context("no such field")?;
    field_words(field, words)
}

fn field_words<'w>(field: &mut Field, words: impl Iterator<Item = &'w str>) -> Result<()> {
    for word in words {
        match word.split_once('=') {
            Some(("list", value)) => value.clone_into(&mut field.list),
            Some(("map", value)) => value.clone_into(&mut field.map),
            Some(("strategy", value)) => value.clone_into(&mut field.strategy),
            Some(("key", value)) => value.clone_into(&mut field.key),
            Some(("enum", value)) => value.clone_into(&mut field.values),
            Some(("default", value)) => value.clone_into(&mut field.default),
            None if word == "required" => field.required = true,
            None if word == "optional" => field.required = false,
            None if word == "pointer" => field.pointer = true,
            None if word == "always" => field.always = true,
            None if word == "0" => field.tag.clear(),
            None => {
                field.tag =
                    word.split('.').map(str::parse).collect::<Result<_, _>>().context(word.to_owned())?
            }
            Some(_) => bail!("unknown word {word}"),
        }
    }
    Ok(())
}
