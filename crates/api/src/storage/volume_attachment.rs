//! VolumeAttachment: REST strategy and validation.

use serde_json::Value;

use super::csi_driver::validate_driver_name;
use crate::core::{persistent_volume, rules};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;
use crate::{meta, names};

pub struct VolumeAttachment;

const MAX_METADATA_BYTES: usize = 256 * 1024;
const MAX_MESSAGE_BYTES: usize = 1024;

impl RestStrategy for VolumeAttachment {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let spec = obj.at("spec");
        let path = Path::new("spec");
        validate_driver_name(spec.text("attacher"), &path.child("attacher"), errors);
        source(spec.at("source"), &path.child("source"), errors);
        rules::validate_name(
            spec.text("nodeName"),
            names::dns1123_subdomain,
            &path.child("nodeName"),
            errors,
        );
        self.validate_status_update(obj, obj, errors);
        if let Some(volume) = spec.path("source.persistentVolumeName").as_str() {
            let path = path.child("source.persistentVolumeName");
            rules::validate_name(volume, names::dns1123_subdomain, &path, errors);
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        meta::validate_immutable(new.at("spec"), old.at("spec"), &Path::new("spec"), errors);
    }

    fn validate_status_update(&self, new: &Value, _old: &Value, errors: &mut ErrorList) {
        let status = new.at("status");
        let path = Path::new("status");
        let size: usize = status
            .entries("attachmentMetadata")
            .map(|(key, value)| key.len() + value.as_str().map_or(0, str::len))
            .sum();
        if size > MAX_METADATA_BYTES {
            errors.too_long(&path.child("attachmentMetadata"), MAX_METADATA_BYTES);
        }
        for field in ["attachError", "detachError"] {
            let path = path.child(field);
            let error = status.at(field);
            if error.text("message").len() > MAX_MESSAGE_BYTES {
                errors.too_long(&path.child("message"), MAX_METADATA_BYTES);
            }
            if let Some(code) = error.int("errorCode").filter(|code| *code < 0) {
                let detail = format!("must be between 0 and {}, inclusive", i32::MAX);
                errors.invalid(&path.child("errorCode"), code, &detail);
            }
        }
    }
}

fn source(source: &Value, path: &Path, errors: &mut ErrorList) {
    let exactly_one = "must specify exactly one of inlineVolumeSpec and persistentVolumeName";
    match (source.has("inlineVolumeSpec"), source.at("persistentVolumeName").as_str()) {
        (false, None) => errors.required(path, exactly_one),
        (true, Some(_)) => errors.forbidden(path, exactly_one),
        (false, Some("")) => {
            let detail = "must specify non empty persistentVolumeName";
            errors.required(&path.child("persistentVolumeName"), detail);
        }
        (false, Some(_)) => {}
        (true, None) => {
            let inline = source.at("inlineVolumeSpec");
            persistent_volume::validate_inline_spec(inline, &path.child("inlineVolumeSpec"), errors);
        }
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check, check_update};

    #[test]
    fn validates_volume_attachments() {
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
