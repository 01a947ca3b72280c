//! Prints pod specs as upstream does in some error messages: all fields, in the order and with the
//! names of its internal Go types. The types are described in a table. The output is kept equal,
//! because users compare these texts.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde_json::Value;

use crate::field::quote;
use crate::json::JsonExt;
use crate::meta;

/// JSON with ordered fields.
enum JsonNode {
    Leaf(Cow<'static, str>),
    List(Vec<JsonNode>),
    Object(Vec<(Cow<'static, str>, JsonNode)>),
}

/// The value of the named type as JSON, indented by one space.
pub(super) fn format_lines(type_name: &str, value: &Value) -> Vec<String> {
    let mut lines = vec![String::new()];
    indent(&build_node(type_name, value, &Value::Null), 0, &mut lines);
    lines
}

/// The value of the named type on a single line.
pub(crate) fn format_compact(type_name: &str, value: &Value) -> String {
    let mut out = String::new();
    write(&build_node(type_name, value, &Value::Null), &mut out);
    out
}

/// Whether two values of the named type are equal for upstream, where an absent field equals its zero value.
pub(crate) fn semantic_equal(type_name: &str, a: &Value, b: &Value) -> bool {
    meta::semantic_equal(a, b)
        || nodes_equal(&build_node(type_name, a, &Value::Null), &build_node(type_name, b, &Value::Null))
}

fn nodes_equal(a: &JsonNode, b: &JsonNode) -> bool {
    let empty = |node: &JsonNode| match node {
        JsonNode::Leaf(text) => text == "null",
        JsonNode::List(items) => items.is_empty(),
        JsonNode::Object(fields) => fields.is_empty(),
    };
    match (a, b) {
        (JsonNode::Leaf(a), JsonNode::Leaf(b)) => a == b,
        (JsonNode::List(a), JsonNode::List(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| nodes_equal(a, b))
        }
        (JsonNode::Object(a), JsonNode::Object(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.0 == b.0 && nodes_equal(&a.1, &b.1))
        }
        _ => empty(a) && empty(b),
    }
}

/// `kind` is a type of the table, a letter for a simple type, or one of them after `*` or `[`.
fn build_node(kind: &str, value: &Value, outer: &Value) -> JsonNode {
    let zero =
        |text: &'static str| if value.is_null() { JsonNode::Leaf(text.into()) } else { build_plain(value) };
    match kind {
        "n" => build_plain(value),
        "s" => zero("\"\""),
        "b" => zero("false"),
        "q" => zero("\"0\""),
        "i" | "x" => zero("0"),
        // Upstream always allocates this struct, because it holds the host fields of the spec.
        "*PodSecurityContext" => build_node("PodSecurityContext", value, outer),
        _ if kind.starts_with(['*', '[']) && value.is_null() => build_plain(value),
        _ if kind.starts_with('[') => {
            let items = value.as_array().into_iter().flatten();
            JsonNode::List(items.map(|item| build_node(&kind[1..], item, value)).collect())
        }
        _ => build_object(kind.trim_start_matches('*'), value, outer),
    }
}

fn build_object(type_name: &str, value: &Value, outer: &Value) -> JsonNode {
    match type_name {
        "@LabelSelector" => return build_tagged(value, &["matchLabels", "matchExpressions"]),
        "@ObjectMeta" => return build_tagged(value, METADATA),
        _ => {}
    }
    let mut found = Vec::new();
    for field in TYPE_FIELDS.get(type_name).map_or(&[][..], Vec::as_slice) {
        if field.kind == "@ObjectMeta" {
            // An embedded struct: its fields are inlined.
            if let JsonNode::Object(inner) = build_object(field.kind, value.at(&field.json), value) {
                found.extend(inner);
            }
            continue;
        }
        let inner = if field.is_outside { outer.at(&field.json) } else { value.at(&field.json) };
        found.push((Cow::Borrowed(field.name), build_node(field.kind, inner, value)));
    }
    JsonNode::Object(found)
}

/// A field of a type.
pub(super) struct TypeField {
    name: &'static str,
    pub json: String,
    pub kind: &'static str,
    /// The field belongs to the parent value.
    is_outside: bool,
}

/// [`TYPE_DEFINITIONS`], parsed.
pub(super) static TYPE_FIELDS: LazyLock<BTreeMap<&str, Vec<TypeField>>> = LazyLock::new(|| {
    let row = |field: &'static str| {
        let (names, kind) = field.split_once(':').unwrap_or((field, "n"));
        let (name, json) = names.split_once('=').unwrap_or((names, ""));
        let json = match json {
            "" => format!("{}{}", name[..1].to_lowercase(), &name[1..]),
            json => json.trim_start_matches('^').to_owned(),
        };
        TypeField { name, json, kind, is_outside: names.contains('^') }
    };
    TYPE_DEFINITIONS
        .iter()
        .map(|(name, fields)| (*name, fields.split_whitespace().map(row).collect()))
        .collect()
});

const METADATA: &[&str] = &["name", "generateName", "namespace", "labels", "annotations"];

/// A type with JSON tags: its present fields in this order.
fn build_tagged(value: &Value, order: &[&str]) -> JsonNode {
    let present =
        order.iter().filter(|field| !matches!(value.at(field), Value::Null) && *value.at(field) != "");
    JsonNode::Object(
        present
            .map(|field| {
                let inner = match *field {
                    "matchExpressions" => JsonNode::List(
                        value
                            .items(field)
                            .iter()
                            .map(|one| build_tagged(one, &["key", "operator", "values"]))
                            .collect(),
                    ),
                    _ => build_plain(value.at(field)),
                };
                (Cow::Owned((*field).to_owned()), inner)
            })
            .collect(),
    )
}

fn build_plain(value: &Value) -> JsonNode {
    match value {
        Value::Array(items) => JsonNode::List(items.iter().map(build_plain).collect()),
        Value::Object(map) => JsonNode::Object(
            map.iter().map(|(name, value)| (Cow::Owned(name.clone()), build_plain(value))).collect(),
        ),
        Value::Null => JsonNode::Leaf("null".into()),
        scalar => JsonNode::Leaf(escape_html(&scalar.to_string()).into()),
    }
}

fn escape_html(json: &str) -> String {
    json.replace('&', "\\u0026").replace('<', "\\u003c").replace('>', "\\u003e")
}

fn write(node: &JsonNode, out: &mut String) {
    match node {
        JsonNode::Leaf(text) => out.push_str(text),
        JsonNode::List(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i > 0 { "," } else { "" });
                write(item, out);
            }
            out.push(']');
        }
        JsonNode::Object(fields) => {
            out.push('{');
            for (i, (name, value)) in fields.iter().enumerate() {
                out.push_str(if i > 0 { "," } else { "" });
                out.push_str(&escape_html(&quote(name)));
                out.push(':');
                write(value, out);
            }
            out.push('}');
        }
    }
}

/// Appends to the last line, and adds further lines.
fn indent(node: &JsonNode, depth: usize, lines: &mut Vec<String>) {
    let (open, close, count) = match node {
        JsonNode::Leaf(text) => return push(lines, text),
        JsonNode::List(items) => ("[", "]", items.len()),
        JsonNode::Object(fields) => ("{", "}", fields.len()),
    };
    push(lines, open);
    for i in 0..count {
        lines.push(" ".repeat(depth + 1));
        match node {
            JsonNode::List(items) => indent(&items[i], depth + 1, lines),
            JsonNode::Object(fields) => {
                push(lines, &format!("{}: ", escape_html(&quote(&fields[i].0))));
                indent(&fields[i].1, depth + 1, lines);
            }
            JsonNode::Leaf(_) => {}
        }
        push(lines, if i + 1 < count { "," } else { "" });
    }
    if count > 0 {
        lines.push(" ".repeat(depth));
    }
    push(lines, close);
}

fn push(lines: &mut [String], text: &str) {
    if let Some(last) = lines.last_mut() {
        last.push_str(text);
    }
}

/// The types below a pod template with their fields as `Name=json:kind`. `=json` is omitted if it is
/// the name with a lower-case first letter. `^` marks a field of the parent value. Kinds: `s` string,
/// `b` bool, `i` int, `q` quantity, `x` int-or-string, `n` a value that is null if absent.
const TYPE_DEFINITIONS: &[(&str, &str)] = &[
    ("PodTemplateSpec", "ObjectMeta=metadata:@ObjectMeta Spec:PodSpec"),
    (
        "PodSpec",
        "Volumes:[Volume InitContainers:[Container Containers:[Container \
         EphemeralContainers:[EphemeralContainer RestartPolicy:s TerminationGracePeriodSeconds:n \
         ActiveDeadlineSeconds:n DNSPolicy=dnsPolicy:s NodeSelector:n ServiceAccountName:s \
         AutomountServiceAccountToken:n NodeName:s SecurityContext:*PodSecurityContext \
         ImagePullSecrets:[LocalObjectReference Hostname:s Subdomain:s SetHostnameAsFQDN:n Affinity:*Affinity \
         SchedulerName:s Tolerations:[Toleration HostAliases:[HostAlias PriorityClassName:s Priority:n \
         PreemptionPolicy:n DNSConfig=dnsConfig:*PodDNSConfig ReadinessGates:[PodReadinessGate \
         RuntimeClassName:n Overhead:n EnableServiceLinks:n \
         TopologySpreadConstraints:[TopologySpreadConstraint OS=os:*PodOS SchedulingGates:[PodSchedulingGate \
         ResourceClaims:[PodResourceClaim Resources:*ResourceRequirements HostnameOverride:n \
         SchedulingGroup:*PodSchedulingGroup",
    ),
    (
        "Volume",
        "Name:s HostPath:*HostPathVolumeSource EmptyDir:*EmptyDirVolumeSource \
         GCEPersistentDisk=gcePersistentDisk:*GCEPersistentDiskVolumeSource \
         AWSElasticBlockStore=awsElasticBlockStore:*AWSElasticBlockStoreVolumeSource \
         GitRepo:*GitRepoVolumeSource Secret:*SecretVolumeSource NFS=nfs:*NFSVolumeSource \
         ISCSI=iscsi:*ISCSIVolumeSource Glusterfs:*GlusterfsVolumeSource \
         PersistentVolumeClaim:*PersistentVolumeClaimVolumeSource RBD=rbd:*RBDVolumeSource \
         Quobyte:*QuobyteVolumeSource FlexVolume:*FlexVolumeSource Cinder:*CinderVolumeSource \
         CephFS=cephfs:*CephFSVolumeSource Flocker:*FlockerVolumeSource DownwardAPI:*DownwardAPIVolumeSource \
         FC=fc:*FCVolumeSource AzureFile:*AzureFileVolumeSource ConfigMap:*ConfigMapVolumeSource \
         VsphereVolume:*VsphereVirtualDiskVolumeSource AzureDisk:*AzureDiskVolumeSource \
         PhotonPersistentDisk:*PhotonPersistentDiskVolumeSource Projected:*ProjectedVolumeSource \
         PortworxVolume:*PortworxVolumeSource ScaleIO:*ScaleIOVolumeSource \
         StorageOS=storageos:*StorageOSVolumeSource CSI=csi:*CSIVolumeSource Ephemeral:*EphemeralVolumeSource \
         Image:*ImageVolumeSource",
    ),
    (
        "Container",
        "Name:s Image:s Command:n Args:n WorkingDir:s Ports:[ContainerPort EnvFrom:[EnvFromSource Env:[EnvVar \
         Resources:ResourceRequirements ResizePolicy:[ContainerResizePolicy RestartPolicy:n \
         RestartPolicyRules:[ContainerRestartRule VolumeMounts:[VolumeMount VolumeDevices:[VolumeDevice \
         LivenessProbe:*Probe ReadinessProbe:*Probe StartupProbe:*Probe Lifecycle:*Lifecycle \
         TerminationMessagePath:s TerminationMessagePolicy:s ImagePullPolicy:s \
         SecurityContext:*SecurityContext Stdin:b StdinOnce:b TTY=tty:b",
    ),
    (
        "EphemeralContainer",
        "Name:s Image:s Command:n Args:n WorkingDir:s Ports:[ContainerPort EnvFrom:[EnvFromSource Env:[EnvVar \
         Resources:ResourceRequirements ResizePolicy:[ContainerResizePolicy RestartPolicy:n \
         RestartPolicyRules:[ContainerRestartRule VolumeMounts:[VolumeMount VolumeDevices:[VolumeDevice \
         LivenessProbe:*Probe ReadinessProbe:*Probe StartupProbe:*Probe Lifecycle:*Lifecycle \
         TerminationMessagePath:s TerminationMessagePolicy:s ImagePullPolicy:s \
         SecurityContext:*SecurityContext Stdin:b StdinOnce:b TTY=tty:b TargetContainerName:s",
    ),
    (
        "PodSecurityContext",
        "HostNetwork=^hostNetwork:b HostPID=^hostPID:b HostIPC=^hostIPC:b \
         ShareProcessNamespace=^shareProcessNamespace:n HostUsers=^hostUsers:n \
         SELinuxOptions=seLinuxOptions:*SELinuxOptions WindowsOptions:*WindowsSecurityContextOptions \
         RunAsUser:n RunAsGroup:n RunAsNonRoot:n SupplementalGroups:n SupplementalGroupsPolicy:n \
         FSGroup=fsGroup:n FSGroupChangePolicy=fsGroupChangePolicy:n Sysctls:[Sysctl \
         SeccompProfile:*SeccompProfile AppArmorProfile:*AppArmorProfile \
         SELinuxChangePolicy=seLinuxChangePolicy:n",
    ),
    ("LocalObjectReference", "Name:s"),
    ("Affinity", "NodeAffinity:*NodeAffinity PodAffinity:*PodAffinity PodAntiAffinity:*PodAntiAffinity"),
    ("Toleration", "Key:s Operator:s Value:s Effect:s TolerationSeconds:n"),
    ("HostAlias", "IP=ip:s Hostnames:n"),
    ("PodDNSConfig", "Nameservers:n Searches:n Options:[PodDNSConfigOption"),
    ("PodReadinessGate", "ConditionType:s"),
    (
        "TopologySpreadConstraint",
        "MaxSkew:i TopologyKey:s WhenUnsatisfiable:s LabelSelector:*@LabelSelector MinDomains:n \
         NodeAffinityPolicy:n NodeTaintsPolicy:n MatchLabelKeys:n",
    ),
    ("PodOS", "Name:s"),
    ("PodSchedulingGate", "Name:s"),
    ("PodResourceClaim", "Name:s ResourceClaimName:n ResourceClaimTemplateName:n"),
    ("ResourceRequirements", "Limits:n Requests:n Claims:[ResourceClaim"),
    ("PodSchedulingGroup", "PodGroupName:n"),
    ("HostPathVolumeSource", "Path:s Type:n"),
    ("EmptyDirVolumeSource", "Medium:s SizeLimit:n"),
    ("GCEPersistentDiskVolumeSource", "PDName=pdName:s FSType=fsType:s Partition:i ReadOnly:b"),
    ("AWSElasticBlockStoreVolumeSource", "VolumeID:s FSType=fsType:s Partition:i ReadOnly:b"),
    ("GitRepoVolumeSource", "Repository:s Revision:s Directory:s"),
    ("SecretVolumeSource", "SecretName:s Items:[KeyToPath DefaultMode:n Optional:n"),
    ("NFSVolumeSource", "Server:s Path:s ReadOnly:b"),
    (
        "ISCSIVolumeSource",
        "TargetPortal:s IQN=iqn:s Lun:i ISCSIInterface=iscsiInterface:s FSType=fsType:s ReadOnly:b Portals:n \
         DiscoveryCHAPAuth=chapAuthDiscovery:b SessionCHAPAuth=chapAuthSession:b \
         SecretRef:*LocalObjectReference InitiatorName:n",
    ),
    ("GlusterfsVolumeSource", "EndpointsName=endpoints:s Path:s ReadOnly:b"),
    ("PersistentVolumeClaimVolumeSource", "ClaimName:s ReadOnly:b"),
    (
        "RBDVolumeSource",
        "CephMonitors=monitors:n RBDImage=image:s FSType=fsType:s RBDPool=pool:s RadosUser=user:s Keyring:s \
         SecretRef:*LocalObjectReference ReadOnly:b",
    ),
    ("QuobyteVolumeSource", "Registry:s Volume:s ReadOnly:b User:s Group:s Tenant:s"),
    ("FlexVolumeSource", "Driver:s FSType=fsType:s SecretRef:*LocalObjectReference ReadOnly:b Options:n"),
    ("CinderVolumeSource", "VolumeID:s FSType=fsType:s ReadOnly:b SecretRef:*LocalObjectReference"),
    (
        "CephFSVolumeSource",
        "Monitors:n Path:s User:s SecretFile:s SecretRef:*LocalObjectReference ReadOnly:b",
    ),
    ("FlockerVolumeSource", "DatasetName:s DatasetUUID:s"),
    ("DownwardAPIVolumeSource", "Items:[DownwardAPIVolumeFile DefaultMode:n"),
    ("FCVolumeSource", "TargetWWNs:n Lun:n FSType=fsType:s ReadOnly:b WWIDs=wwids:n"),
    ("AzureFileVolumeSource", "SecretName:s ShareName:s ReadOnly:b"),
    ("ConfigMapVolumeSource", "Name:s Items:[KeyToPath DefaultMode:n Optional:n"),
    ("VsphereVirtualDiskVolumeSource", "VolumePath:s FSType=fsType:s StoragePolicyName:s StoragePolicyID:s"),
    (
        "AzureDiskVolumeSource",
        "DiskName:s DataDiskURI=diskURI:s CachingMode:n FSType=fsType:n ReadOnly:n Kind:n",
    ),
    ("PhotonPersistentDiskVolumeSource", "PdID:s FSType=fsType:s"),
    ("ProjectedVolumeSource", "Sources:[VolumeProjection DefaultMode:n"),
    ("PortworxVolumeSource", "VolumeID:s FSType=fsType:s ReadOnly:b"),
    (
        "ScaleIOVolumeSource",
        "Gateway:s System:s SecretRef:*LocalObjectReference SSLEnabled=sslEnabled:b ProtectionDomain:s \
         StoragePool:s StorageMode:s VolumeName:s FSType=fsType:s ReadOnly:b",
    ),
    (
        "StorageOSVolumeSource",
        "VolumeName:s VolumeNamespace:s FSType=fsType:s ReadOnly:b SecretRef:*LocalObjectReference",
    ),
    (
        "CSIVolumeSource",
        "Driver:s ReadOnly:n FSType=fsType:n VolumeAttributes:n NodePublishSecretRef:*LocalObjectReference",
    ),
    ("EphemeralVolumeSource", "VolumeClaimTemplate:*PersistentVolumeClaimTemplate"),
    ("ImageVolumeSource", "Reference:s PullPolicy:s"),
    ("ContainerPort", "Name:s HostPort:i ContainerPort:i Protocol:s HostIP:s"),
    ("EnvFromSource", "Prefix:s ConfigMapRef:*ConfigMapEnvSource SecretRef:*SecretEnvSource"),
    ("EnvVar", "Name:s Value:s ValueFrom:*EnvVarSource"),
    ("ContainerResizePolicy", "ResourceName:s RestartPolicy:s"),
    ("ContainerRestartRule", "Action:s ExitCodes:*ContainerRestartRuleOnExitCodes"),
    (
        "VolumeMount",
        "Name:s ReadOnly:b RecursiveReadOnly:n MountPath:s SubPath:s MountPropagation:n SubPathExpr:s",
    ),
    ("VolumeDevice", "Name:s DevicePath:s"),
    (
        "Probe",
        "Exec:*ExecAction HTTPGet=httpGet:*HTTPGetAction TCPSocket=tcpSocket:*TCPSocketAction \
         GRPC=grpc:*GRPCAction InitialDelaySeconds:i TimeoutSeconds:i PeriodSeconds:i SuccessThreshold:i \
         FailureThreshold:i TerminationGracePeriodSeconds:n",
    ),
    ("Lifecycle", "PostStart:*LifecycleHandler PreStop:*LifecycleHandler StopSignal:n"),
    (
        "SecurityContext",
        "Capabilities:*Capabilities Privileged:n SELinuxOptions=seLinuxOptions:*SELinuxOptions \
         WindowsOptions:*WindowsSecurityContextOptions RunAsUser:n RunAsGroup:n RunAsNonRoot:n \
         ReadOnlyRootFilesystem:n AllowPrivilegeEscalation:n ProcMount:n SeccompProfile:*SeccompProfile \
         AppArmorProfile:*AppArmorProfile",
    ),
    ("SELinuxOptions", "User:s Role:s Type:s Level:s"),
    (
        "WindowsSecurityContextOptions",
        "GMSACredentialSpecName=gmsaCredentialSpecName:n GMSACredentialSpec=gmsaCredentialSpec:n \
         RunAsUserName:n HostProcess:n",
    ),
    ("Sysctl", "Name:s Value:s"),
    ("SeccompProfile", "Type:s LocalhostProfile:n"),
    ("AppArmorProfile", "Type:s LocalhostProfile:n"),
    (
        "NodeAffinity",
        "RequiredDuringSchedulingIgnoredDuringExecution:*NodeSelector \
         PreferredDuringSchedulingIgnoredDuringExecution:[PreferredSchedulingTerm",
    ),
    (
        "PodAffinity",
        "RequiredDuringSchedulingIgnoredDuringExecution:[PodAffinityTerm \
         PreferredDuringSchedulingIgnoredDuringExecution:[WeightedPodAffinityTerm",
    ),
    (
        "PodAntiAffinity",
        "RequiredDuringSchedulingIgnoredDuringExecution:[PodAffinityTerm \
         PreferredDuringSchedulingIgnoredDuringExecution:[WeightedPodAffinityTerm",
    ),
    ("PodDNSConfigOption", "Name:s Value:n"),
    ("ResourceClaim", "Name:s Request:s"),
    ("KeyToPath", "Key:s Path:s Mode:n"),
    (
        "DownwardAPIVolumeFile",
        "Path:s FieldRef:*ObjectFieldSelector ResourceFieldRef:*ResourceFieldSelector Mode:n",
    ),
    (
        "VolumeProjection",
        "Secret:*SecretProjection DownwardAPI:*DownwardAPIProjection ConfigMap:*ConfigMapProjection \
         ServiceAccountToken:*ServiceAccountTokenProjection ClusterTrustBundle:*ClusterTrustBundleProjection \
         PodCertificate:*PodCertificateProjection",
    ),
    ("PersistentVolumeClaimTemplate", "ObjectMeta=metadata:@ObjectMeta Spec:PersistentVolumeClaimSpec"),
    ("ConfigMapEnvSource", "Name:s Optional:n"),
    ("SecretEnvSource", "Name:s Optional:n"),
    (
        "EnvVarSource",
        "FieldRef:*ObjectFieldSelector ResourceFieldRef:*ResourceFieldSelector \
         ConfigMapKeyRef:*ConfigMapKeySelector SecretKeyRef:*SecretKeySelector FileKeyRef:*FileKeySelector",
    ),
    ("ContainerRestartRuleOnExitCodes", "Operator:s Values:n"),
    ("ExecAction", "Command:n"),
    ("HTTPGetAction", "Path:s Port:x Host:s Scheme:s HTTPHeaders=httpHeaders:[HTTPHeader"),
    ("TCPSocketAction", "Port:x Host:s"),
    ("GRPCAction", "Port:i Service:n"),
    (
        "LifecycleHandler",
        "Exec:*ExecAction HTTPGet=httpGet:*HTTPGetAction TCPSocket=tcpSocket:*TCPSocketAction \
         Sleep:*SleepAction",
    ),
    ("Capabilities", "Add:n Drop:n"),
    ("NodeSelector", "NodeSelectorTerms:[NodeSelectorTerm"),
    ("PreferredSchedulingTerm", "Weight:i Preference:NodeSelectorTerm"),
    (
        "PodAffinityTerm",
        "LabelSelector:*@LabelSelector Namespaces:n TopologyKey:s NamespaceSelector:*@LabelSelector \
         MatchLabelKeys:n MismatchLabelKeys:n",
    ),
    ("WeightedPodAffinityTerm", "Weight:i PodAffinityTerm:PodAffinityTerm"),
    ("ObjectFieldSelector", "APIVersion=apiVersion:s FieldPath:s"),
    ("ResourceFieldSelector", "ContainerName:s Resource:s Divisor:q"),
    ("SecretProjection", "Name:s Items:[KeyToPath Optional:n"),
    ("DownwardAPIProjection", "Items:[DownwardAPIVolumeFile"),
    ("ConfigMapProjection", "Name:s Items:[KeyToPath Optional:n"),
    ("ServiceAccountTokenProjection", "Audience:s ExpirationSeconds:i Path:s"),
    ("ClusterTrustBundleProjection", "Name:n SignerName:n LabelSelector:*@LabelSelector Optional:n Path:s"),
    (
        "PodCertificateProjection",
        "SignerName:s KeyType:s MaxExpirationSeconds:n CredentialBundlePath:s KeyPath:s \
         CertificateChainPath:s UserAnnotations:n",
    ),
    (
        "PersistentVolumeClaimSpec",
        "AccessModes:n Selector:*@LabelSelector Resources:VolumeResourceRequirements VolumeName:s \
         StorageClassName:n VolumeMode:n DataSource:*TypedLocalObjectReference \
         DataSourceRef:*TypedObjectReference VolumeAttributesClassName:n",
    ),
    ("ConfigMapKeySelector", "Name:s Key:s Optional:n"),
    ("SecretKeySelector", "Name:s Key:s Optional:n"),
    ("FileKeySelector", "VolumeName:s Path:s Key:s Optional:n"),
    ("HTTPHeader", "Name:s Value:s"),
    ("SleepAction", "Seconds:i"),
    ("NodeSelectorTerm", "MatchExpressions:[NodeSelectorRequirement MatchFields:[NodeSelectorRequirement"),
    ("VolumeResourceRequirements", "Limits:n Requests:n"),
    ("TypedLocalObjectReference", "APIGroup=apiGroup:n Kind:s Name:s"),
    ("TypedObjectReference", "APIGroup=apiGroup:n Kind:s Name:s Namespace:n"),
    ("NodeSelectorRequirement", "Key:s Operator:s Values:n"),
];
