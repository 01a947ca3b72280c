//! What extends the API: webhooks, admission policies, custom resources and aggregated servers.

use serde_json::{Value, json};

use super::Constant::{Int, Struct, Text};
use super::Row;
use super::Rule::{self, Fill, Set};
use crate::json::Json;

pub(super) const ROWS: &[Row] = &[
    Row { ty: "admissionregistration.v1.ValidatingWebhook", rules: WEBHOOK },
    Row {
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
    Row { ty: "admissionregistration.v1.RuleWithOperations", rules: &[Set("scope", Text("*"))] },
    Row { ty: "admissionregistration.v1.NamedRuleWithOperations", rules: &[Set("scope", Text("*"))] },
    Row { ty: "admissionregistration.v1.ServiceReference", rules: HTTPS },
    Row {
        ty: "admissionregistration.v1.ValidatingAdmissionPolicySpec",
        rules: &[Set("failurePolicy", Text("Fail"))],
    },
    Row {
        ty: "admissionregistration.v1.MutatingAdmissionPolicySpec",
        rules: &[Set("failurePolicy", Text("Fail"))],
    },
    Row {
        ty: "admissionregistration.v1.MatchResources",
        rules: &[
            Set("matchPolicy", Text("Equivalent")),
            Set("namespaceSelector", Struct),
            Set("objectSelector", Struct),
        ],
    },
    Row {
        ty: "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.CustomResourceDefinition",
        rules: &[Fill(custom_resource_definition)],
    },
    Row { ty: "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.ServiceReference", rules: HTTPS },
    Row { ty: "io.k8s.kube-aggregator.pkg.apis.apiregistration.v1.ServiceReference", rules: HTTPS },
];

const HTTPS: &[Rule] = &[Set("port", Int(443))];

const WEBHOOK: &[Rule] = &[
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
    spec.default_to("conversion", json!({"strategy": "None"}));
    let stored = spec.items("versions").iter().find(|version| version.flag("storage"));
    let stored = stored.map(|version| version.at("name").clone());
    if let Some(stored) = stored
        && crd.path("status.storedVersions").as_array().is_none_or(Vec::is_empty)
    {
        crd.object_mut("status").insert("storedVersions".to_owned(), json!([stored]));
    }
}
