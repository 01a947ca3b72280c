//! Defaults of API extensions: webhooks, admission policies, CRDs and APIServices.

use serde_json::{Value, json};

use super::DefaultRule::{self, Apply, Set};
use super::DefaultValue::{Int, Struct, Text};
use super::TypeDefaults;
use crate::json::JsonExt;

pub(super) const TYPE_DEFAULTS: &[TypeDefaults] = &[
    TypeDefaults { ty: "admissionregistration.v1.ValidatingWebhook", rules: WEBHOOK_RULES },
    TypeDefaults {
        ty: "admissionregistration.v1.MutatingWebhook",
        rules: &[
            Set("failurePolicy", Text("Fail")),
            Set("matchPolicy", Text("Equivalent")),
            Set("namespaceSelector", Struct),
            Set("objectSelector", Struct),
            Set("timeoutSeconds", Int(10)),
            Set("reinvocationPolicy", Text("Never")),
        ],
    },
    TypeDefaults { ty: "admissionregistration.v1.RuleWithOperations", rules: &[Set("scope", Text("*"))] },
    TypeDefaults {
        ty: "admissionregistration.v1.NamedRuleWithOperations",
        rules: &[Set("scope", Text("*"))],
    },
    TypeDefaults { ty: "admissionregistration.v1.ServiceReference", rules: SERVICE_REFERENCE_RULES },
    TypeDefaults {
        ty: "admissionregistration.v1.ValidatingAdmissionPolicySpec",
        rules: &[Set("failurePolicy", Text("Fail"))],
    },
    TypeDefaults {
        ty: "admissionregistration.v1.MutatingAdmissionPolicySpec",
        rules: &[Set("failurePolicy", Text("Fail"))],
    },
    TypeDefaults {
        ty: "admissionregistration.v1.MatchResources",
        rules: &[
            Set("matchPolicy", Text("Equivalent")),
            Set("namespaceSelector", Struct),
            Set("objectSelector", Struct),
        ],
    },
    TypeDefaults {
        ty: "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.CustomResourceDefinition",
        rules: &[Apply(custom_resource_definition)],
    },
    TypeDefaults {
        ty: "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.ServiceReference",
        rules: SERVICE_REFERENCE_RULES,
    },
    TypeDefaults {
        ty: "io.k8s.kube-aggregator.pkg.apis.apiregistration.v1.ServiceReference",
        rules: SERVICE_REFERENCE_RULES,
    },
];

const SERVICE_REFERENCE_RULES: &[DefaultRule] = &[Set("port", Int(443))];

const WEBHOOK_RULES: &[DefaultRule] = &[
    Set("failurePolicy", Text("Fail")),
    Set("matchPolicy", Text("Equivalent")),
    Set("namespaceSelector", Struct),
    Set("objectSelector", Struct),
    Set("timeoutSeconds", Int(10)),
];

fn custom_resource_definition(crd: &mut Value) {
    crd.object_mut("spec");
    let spec = &mut crd["spec"];
    let kind = spec.path("names.kind").as_str().unwrap_or("").to_owned();
    spec.object_mut("names");
    let names = &mut spec["names"];
    if names.text("singular").is_empty() && !kind.is_empty() {
        names.set("singular", kind.to_lowercase());
    }
    if names.text("listKind").is_empty() && !kind.is_empty() {
        names.set("listKind", format!("{kind}List"));
    }
    spec.set_default("conversion", json!({"strategy": "None"}));
    let stored = spec.items("versions").iter().find(|version| version.flag("storage"));
    let stored = stored.map(|version| version.at("name").clone());
    if let Some(stored) = stored
        && crd.path("status.storedVersions").as_array().is_none_or(Vec::is_empty)
    {
        crd.object_mut("status").insert("storedVersions".to_owned(), json!([stored]));
    }
}
