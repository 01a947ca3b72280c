//! VolumeAttachment: what is special about it.

use serde_json::Value;

use super::csi_driver::driver_name;
use crate::core::{persistent_volume, rules};
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;
use crate::{meta, names};

pub struct VolumeAttachment;

const MAX_METADATA: usize = 256 * 1024;
const MAX_MESSAGE: usize = 1024;

impl Kind for VolumeAttachment {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        let spec = obj.at("spec");
        let path = Path::new("spec");
        driver_name(spec.text("attacher"), &path.at("attacher"), errors);
        source(spec.at("source"), &path.at("source"), errors);
        rules::name(spec.text("nodeName"), names::dns1123_subdomain, &path.at("nodeName"), errors);
        self.validate_status(obj, obj, errors);
        if let Some(volume) = spec.path("source.persistentVolumeName").as_str() {
            let path = path.at("source.persistentVolumeName");
            rules::name(volume, names::dns1123_subdomain, &path, errors);
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut Errors) {
        meta::immutable(new.at("spec"), old.at("spec"), &Path::new("spec"), errors);
    }

    fn validate_status(&self, new: &Value, _old: &Value, errors: &mut Errors) {
        let status = new.at("status");
        let path = Path::new("status");
        let size: usize = status
            .entries("attachmentMetadata")
            .map(|(key, value)| key.len() + value.as_str().map_or(0, str::len))
            .sum();
        if size > MAX_METADATA {
            errors.too_long(&path.at("attachmentMetadata"), MAX_METADATA);
        }
        for field in ["attachError", "detachError"] {
            let path = path.at(field);
            let error = status.at(field);
            if error.text("message").len() > MAX_MESSAGE {
                errors.too_long(&path.at("message"), MAX_METADATA);
            }
            if let Some(code) = error.int("errorCode").filter(|code| *code < 0) {
                let detail = format!("must be between 0 and {}, inclusive", i32::MAX);
                errors.invalid(&path.at("errorCode"), code, &detail);
            }
        }
    }
}

fn source(source: &Value, path: &Path, errors: &mut Errors) {
    let exactly_one = "must specify exactly one of inlineVolumeSpec and persistentVolumeName";
    match (source.has("inlineVolumeSpec"), source.at("persistentVolumeName").as_str()) {
        (false, None) => errors.required(path, exactly_one),
        (true, Some(_)) => errors.forbidden(path, exactly_one),
        (false, Some("")) => {
            let detail = "must specify non empty persistentVolumeName";
            errors.required(&path.at("persistentVolumeName"), detail);
        }
        (false, Some(_)) => {}
        (true, None) => {
            let inline = source.at("inlineVolumeSpec");
            persistent_volume::check_inline(inline, &path.at("inlineVolumeSpec"), errors);
        }
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check, check_update};

    #[test]
    fn attachments() {
        let good =
            r#"{"spec": {"attacher": "a.io", "nodeName": "n", "source": {"persistentVolumeName": "p"}}}"#;
        check(&VolumeAttachment, good, &expect![""]);
        check(
            &VolumeAttachment,
            r#"{"spec": {"nodeName": "n", "source": {}}, "status": {"attachError": {"errorCode": -1}}}"#,
            &expect![[r#"
                spec.attacher: Required value
                spec.source: Required value: must specify exactly one of inlineVolumeSpec and persistentVolumeName
                status.attachError.errorCode: Invalid value: -1: must be between 0 and 2147483647, inclusive
            "#]],
        );
        check_update(
            &VolumeAttachment,
            good,
            &good.replace("\"n\"", "\"m\""),
            &expect![[r#"
            spec: Invalid value: {"attacher":"a.io","nodeName":"m","source":{"persistentVolumeName":"p"}}: field is immutable
        "#]],
        );
    }
}
